#include "server/scheduler/workers/available_cores.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/scheduler/workers/cpu_topology.h"

namespace optstate::scheduler {
namespace {

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int CoresOf(absl::string_view quota, absl::string_view period, int limit) {
  int64_t quota_us = 0;
  int64_t period_us = 0;
  // "max" and -1 mean no quota.
  if (!absl::SimpleAtoi(quota, &quota_us) || quota_us <= 0) return limit;
  if (!absl::SimpleAtoi(period, &period_us) || period_us <= 0) return limit;
  const int64_t cores = (quota_us + period_us - 1) / period_us;
  return static_cast<int>(
      std::clamp<int64_t>(cores, 1, static_cast<int64_t>(limit)));
}

int CoresOfGroup(const std::string& folder, bool unified, int limit) {
  if (!unified) {
    return CoresOf(FirstLine(folder + "/cpu.cfs_quota_us"),
                   FirstLine(folder + "/cpu.cfs_period_us"), limit);
  }
  const std::string line = FirstLine(folder + "/cpu.max");
  const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
  return words.size() == 2 ? CoresOf(words[0], words[1], limit) : limit;
}

// Applies the quotas of the group at `path` below the mount and of all its
// parents: each may have one.
int CoresOfGroups(const std::string& mount, absl::string_view path,
                  bool unified, int limit) {
  while (true) {
    limit = CoresOfGroup(absl::StrCat(mount, path == "/" ? "" : path), unified,
                         limit);
    const size_t slash = path.rfind('/');
    if (slash == absl::string_view::npos || path.size() <= 1) return limit;
    path = path.substr(0, slash);
  }
}

}  // namespace

int CgroupCoresBelow(const std::string& root, int limit) {
  // Lines "HIERARCHY:CONTROLLERS:PATH"; v2 is "0::PATH" (cgroups(7)).
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::vector<absl::string_view> fields =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    if (fields[1].empty()) {
      limit = CoresOfGroups(root + "/sys/fs/cgroup", fields[2], true, limit);
      continue;
    }
    for (absl::string_view controller : absl::StrSplit(fields[1], ',')) {
      if (controller != "cpu") continue;
      limit =
          CoresOfGroups(root + "/sys/fs/cgroup/cpu", fields[2], false, limit);
    }
  }
  return limit;
}

int AvailableCores() {
  return CgroupCoresBelow("", static_cast<int>(AllowedCpus().size()));
}

}  // namespace optstate::scheduler
