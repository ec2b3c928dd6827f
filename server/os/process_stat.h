#ifndef OPTSTATE_SERVER_OS_PROCESS_STAT_H_
#define OPTSTATE_SERVER_OS_PROCESS_STAT_H_

#include <sys/types.h>

#include <cstdint>

#include "absl/status/statusor.h"

namespace optstate::os {

// The fields used of /proc/PID/stat.
struct ProcessStat {
  // True when the process has begun to exit and is not reaped yet. A dying
  // process closes its files one after another, and a pidfd reports its end
  // only after that: in between it looks alive, and data sent to it is lost.
  bool is_exiting = false;
  // Start time since boot; together with the pid it identifies the process for
  // good.
  uint64_t start_ticks = 0;
};

// Returns NOT_FOUND when there is no such process, or none that this one may
// see.
absl::StatusOr<ProcessStat> ReadProcessStat(pid_t pid);

// Returns whether the process started at `start_ticks` (0: not known) runs.
// Also false when the process cannot be inspected.
bool IsRunning(pid_t pid, uint64_t start_ticks);

// Returns whether the process has ended, or begun to. Also false when that
// cannot be seen.
bool HasEnded(pid_t pid, uint64_t start_ticks);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_PROCESS_STAT_H_
