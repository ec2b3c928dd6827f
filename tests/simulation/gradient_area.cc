#include "tests/simulation/gradient_area.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/session/recovery/staging_file.h"
#include "storage/state_file.h"

namespace optstate::simulation {

absl::StatusOr<std::shared_ptr<GradientArea>> GradientArea::Map(
    const std::string& path, uint64_t bytes) {
  bool is_present = false;
  OPTSTATE_ASSIGN_OR_RETURN(const storage::StateFile file,
                            session::MakeStagingFile(path, bytes, &is_present));
  const uint64_t size = std::max<uint64_t>(bytes, 1);
  void* const data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
  if (data == MAP_FAILED) return OsError(errno, absl::StrCat("mmap ", path));
  return std::shared_ptr<GradientArea>(
      new GradientArea(static_cast<std::byte*>(data), size, is_present));
}

GradientArea::~GradientArea() { ::munmap(data_, size_); }

}  // namespace optstate::simulation
