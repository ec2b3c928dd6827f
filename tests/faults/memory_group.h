#ifndef OPTSTATE_TESTS_FAULTS_MEMORY_GROUP_H_
#define OPTSTATE_TESTS_FAULTS_MEMORY_GROUP_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace optstate::faults {

// A control group whose memory is limited, below the one that the test is in.
class MemoryGroup {
 public:
  // Makes a group. UNAVAILABLE, with the reason, where a test cannot have one:
  // cgroup v2 does not let a group have processes and limited groups below it,
  // and version 1 needs its memory controller mounted, and the right to make a
  // group.
  static absl::StatusOr<std::unique_ptr<MemoryGroup>> Make(uint64_t bytes_max);
  // Destroys the group, when its processes have ended.
  ~MemoryGroup();

  // Adds the process: from here on what it takes counts; what it has does not.
  absl::Status Add(pid_t pid) const;
  // Returns the number of processes that the kernel has killed because the
  // group was full.
  absl::StatusOr<uint64_t> Kills() const;

 private:
  explicit MemoryGroup(std::string path) : path_(std::move(path)) {}

  const std::string path_;
};

}  // namespace optstate::faults

#endif  // OPTSTATE_TESTS_FAULTS_MEMORY_GROUP_H_
