#ifndef OPTSTATE_SERVER_OS_CPU_GROUP_H_
#define OPTSTATE_SERVER_OS_CPU_GROUP_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::os {

// The process's own group of cgroup v2, where it was delegated to the process
// together with the cpu controller: groups below it divide the cores by weight.
//
// The groups below are threaded ones, so that the process, and whatever else is
// in its group, can stay there: an ordinary group cannot have both members and
// children with weights, and a service manager could not start a dead daemon
// again in it.
//
// Threads: not thread-safe.
class CpuGroup {
 public:
  // An error says why the process's own group cannot be used. `root`: "" or the
  // directory of a test's files.
  static absl::StatusOr<CpuGroup> Find(const std::string& root = "");

  const std::string& path() const { return path_; }

  // A group and its cpu.weight.
  struct Share {
    std::string name;
    uint32_t weight = 0;
  };

  // Puts a process into the group `member` below `group`, which is below this
  // one; makes both when needed. `group` divides its share of the cores between
  // its members by their weights.
  absl::Status Put(const Share& group, const Share& member, pid_t pid) const;
  // Removes the group NAME, or NAME/MEMBER, below; harmless when there is none,
  // or when it has members.
  void Remove(absl::string_view name) const;

 private:
  explicit CpuGroup(std::string path) : path_(std::move(path)) {}

  std::string path_;
};

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_CPU_GROUP_H_
