#include "tests/faults/memory_group.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::faults {
namespace {

constexpr char kMemoryController[] = "/sys/fs/cgroup/memory";

// Reads a line such as "4:memory:/some/group".
absl::StatusOr<std::string> OwnGroup() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() == 3 && fields[1] == "memory") {
      return absl::StrCat(kMemoryController, fields[2]);
    }
  }
  return absl::UnavailableError("there is no memory controller of cgroup v1");
}

absl::Status Write(const std::string& path, int64_t value) {
  std::ofstream file(path);
  file << value << std::flush;
  if (file.good()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", path));
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryGroup>> MemoryGroup::Make(
    uint64_t bytes_max) {
  OPTSTATE_ASSIGN_OR_RETURN(std::string path, OwnGroup());
  absl::StrAppend(&path, "/optstate-test-XXXXXX");
  if (mkdtemp(path.data()) == nullptr) {
    return absl::UnavailableError(
        OsError(errno, absl::StrCat("mkdir ", path)).message());
  }
  std::unique_ptr<MemoryGroup> group(new MemoryGroup(std::move(path)));
  OPTSTATE_RETURN_IF_ERROR(Write(group->path_ + "/memory.limit_in_bytes",
                                 static_cast<int64_t>(bytes_max)));
  return group;
}

MemoryGroup::~MemoryGroup() { rmdir(path_.c_str()); }

absl::Status MemoryGroup::Add(pid_t pid) const {
  return Write(path_ + "/cgroup.procs", pid);
}

absl::StatusOr<uint64_t> MemoryGroup::Kills() const {
  const std::string path = path_ + "/memory.oom_control";
  std::ifstream file(path);
  uint64_t kills = 0;
  for (std::string name; file >> name >> kills;) {
    if (name == "oom_kill") return kills;
  }
  return absl::NotFoundError(absl::StrCat(path, " has no oom_kill"));
}

}  // namespace optstate::faults
