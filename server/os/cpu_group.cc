#include "server/os/cpu_group.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::os {
namespace {

// Name of a trial group.
constexpr char kProbe[] = "optstate.probe";

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Writes to a cgroup's file, which exists; each write is a command.
absl::Status Command(const std::string& path, absl::string_view text) {
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  if (::write(fd.get(), text.data(), text.size()) !=
      static_cast<ssize_t>(text.size())) {
    return OsError(errno, absl::StrCat("write \"", text, "\" to ", path));
  }
  return absl::OkStatus();
}

absl::Status MakeThreadedGroup(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) {
    return OsError(errno, absl::StrCat("mkdir ", path));
  }
  return Command(path + "/cgroup.type", "threaded");
}

absl::Status MakeGroup(const std::string& path, uint32_t weight) {
  OPTSTATE_RETURN_IF_ERROR(MakeThreadedGroup(path));
  return Command(path + "/cpu.weight", absl::StrCat(weight));
}

// "0::PATH" is the line of the second version (cgroups(7)).
absl::StatusOr<std::string> OwnGroup(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const absl::string_view text = line;
    if (text.substr(0, 3) == "0::") return line.substr(3);
  }
  return absl::NotFoundError("there is no cgroup v2");
}

bool HasAttribute(const std::string& path, const char* name) {
  char value = 0;
  return ::getxattr(path.c_str(), name, &value, 1) == 1 && value == '1';
}

// Returns whether the group is delegated. systemd marks delegated groups.
// Without a mark a group is the daemon's own only at the top of a cgroup
// namespace (the machine's top group has no type). Root may write everywhere,
// so that proves nothing.
bool IsDelegated(const std::string& path, bool top) {
  return HasAttribute(path, "user.delegate") ||
         HasAttribute(path, "trusted.delegate") ||
         (top && ::access((path + "/cgroup.type").c_str(), W_OK) == 0);
}

bool HasCpuController(const std::string& group) {
  const std::string line = FirstLine(group + "/cgroup.controllers");
  const std::vector<absl::string_view> names = absl::StrSplit(line, ' ');
  return absl::c_linear_search(names, "cpu");
}

}  // namespace

absl::StatusOr<CpuGroup> CpuGroup::Find(const std::string& root) {
  const absl::StatusOr<std::string> found = OwnGroup(root);
  OPTSTATE_RETURN_IF_ERROR(found.status());
  const std::string& own = *found;
  const bool top = own == "/";
  const std::string group =
      absl::StrCat(root, "/sys/fs/cgroup", top ? "" : own);
  if (!HasCpuController(group)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the group ", own, " has no cpu controller"));
  }
  if (!IsDelegated(group, top)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the group ", own, " is not delegated to the daemon (Delegate=yes)"));
  }
  const std::string probe = absl::StrCat(group, "/", kProbe);
  absl::Status status = MakeThreadedGroup(probe);
  if (status.ok()) status = Command(group + "/cgroup.subtree_control", "+cpu");
  if (status.ok()) status = Command(probe + "/cpu.weight", "100");
  (void)::rmdir(probe.c_str());
  OPTSTATE_RETURN_IF_ERROR(status);
  return CpuGroup(group);
}

absl::Status CpuGroup::Put(const Share& group, const Share& member,
                           pid_t pid) const {
  const std::string upper = absl::StrCat(path_, "/", group.name);
  const std::string lower = absl::StrCat(upper, "/", member.name);
  OPTSTATE_RETURN_IF_ERROR(MakeGroup(upper, group.weight));
  // A threaded group may have members' groups with weights below it.
  OPTSTATE_RETURN_IF_ERROR(Command(upper + "/cgroup.subtree_control", "+cpu"));
  OPTSTATE_RETURN_IF_ERROR(MakeGroup(lower, member.weight));
  return Command(lower + "/cgroup.procs", absl::StrCat(pid));
}

void CpuGroup::Remove(absl::string_view name) const {
  (void)::rmdir(absl::StrCat(path_, "/", name).c_str());
}

}  // namespace optstate::os
