#include "server/supervisor/drain_marker.h"

#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "server/os/small_file.h"

namespace optstate::supervisor {
namespace {

std::string PathIn(const std::string& state_dir) {
  return absl::StrCat(state_dir, "/draining");
}

}  // namespace

bool HasDrainMarker(const std::string& state_dir) {
  return ::access(PathIn(state_dir).c_str(), F_OK) == 0;
}

absl::Status SetDrainMarker(const std::string& state_dir, bool draining) {
  const std::string path = PathIn(state_dir);
  if (draining) {
    const absl::Status created = os::CreateSmallFile(path, "");
    return absl::IsAlreadyExists(created) ? absl::OkStatus() : created;
  }
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return OsError(errno, absl::StrCat("remove ", path));
}

}  // namespace optstate::supervisor
