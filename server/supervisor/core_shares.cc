#include "server/supervisor/core_shares.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/supervisor/job_weight.h"

namespace optstate::supervisor {
namespace {

constexpr int kNiceMin = -20;
constexpr int kNiceMax = 19;
// Name of a trial group; jobs' groups begin with "optstate-".
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

// Whether the group is delegated. systemd marks delegated groups. Without a
// mark a group is the daemon's own only at the top of a cgroup namespace (the
// machine's top group has no type). Root may write everywhere, so that proves
// nothing.
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

// Tries to raise the priority: a capability, a limit and a security module can
// all decide. Lowering it again is always allowed.
bool MayRaisePriority(int nice) {
  if (nice <= kNiceMin) return false;
  if (::setpriority(PRIO_PROCESS, 0, nice - 1) != 0) return false;
  (void)::setpriority(PRIO_PROCESS, 0, nice);
  return true;
}

}  // namespace

CoreShares CoreShares::Find(const v1::EngineSettings& settings,
                            const std::string& root) {
  CoreShares shares(settings);
  const absl::Status cgroup = shares.UseCgroup(root);
  if (!cgroup.ok()) {
    shares.UseNice();
    absl::StrAppend(&shares.description_,
                    "; not by cgroups: ", cgroup.message());
  }
  return shares;
}

absl::Status CoreShares::UseCgroup(const std::string& root) {
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
  group_ = group;
  description_ = absl::StrCat("cgroup v2 cpu.weight below ", group);
  return absl::OkStatus();
}

void CoreShares::UseNice() {
  nice_of_100_ = ::getpriority(PRIO_PROCESS, 0);
  const int best = NiceSteps(LargestWeight(settings_));
  description_ = "nice values";
  if (best >= 0 || MayRaisePriority(nice_of_100_)) return;
  // The ratios are kept: the heaviest job gets the daemon's own value, the
  // others less time.
  nice_of_100_ -= best;
  absl::StrAppend(&description_,
                  ", all of them lowered, for none may be raised");
}

int CoreShares::NiceOf(const std::string& job) const {
  return std::clamp(nice_of_100_ + NiceSteps(WeightOf(settings_, job)),
                    kNiceMin, kNiceMax);
}

std::string CoreShares::GroupOf(const std::string& job) const {
  return absl::StrCat(group_, "/optstate-", job);
}

absl::Status CoreShares::Apply(const std::string& job, pid_t pid) const {
  return group_.empty() ? ApplyNice(job, pid) : ApplyWeight(job, pid);
}

absl::Status CoreShares::ApplyWeight(const std::string& job, pid_t pid) const {
  const std::string group = GroupOf(job);
  OPTSTATE_RETURN_IF_ERROR(MakeThreadedGroup(group));
  OPTSTATE_RETURN_IF_ERROR(
      Command(group + "/cpu.weight", absl::StrCat(WeightOf(settings_, job))));
  return Command(group + "/cgroup.procs", absl::StrCat(pid));
}

// Sets nice values: each belongs to a thread, and threads that it starts
// inherit it.
absl::Status CoreShares::ApplyNice(const std::string& job, pid_t pid) const {
  const int nice = NiceOf(job);
  absl::Status status;
  std::error_code error;
  std::filesystem::directory_iterator threads(
      absl::StrCat("/proc/", pid, "/task"), error);
  if (error) return OsError(error.value(), "list the engine's threads");
  for (const auto& entry : threads) {
    id_t thread = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &thread)) continue;
    if (::setpriority(PRIO_PROCESS, thread, nice) != 0 && errno != ESRCH) {
      status.Update(OsError(errno, absl::StrCat("nice value ", nice)));
    }
  }
  return status;
}

void CoreShares::Forget(const std::string& job) const {
  if (!group_.empty()) (void)::rmdir(GroupOf(job).c_str());
}

}  // namespace optstate::supervisor
