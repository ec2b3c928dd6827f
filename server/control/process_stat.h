#ifndef OPTSTATE_SERVER_CONTROL_PROCESS_STAT_H_
#define OPTSTATE_SERVER_CONTROL_PROCESS_STAT_H_

#include <sys/types.h>

#include <cstdint>

#include "absl/status/statusor.h"

namespace optstate::control {

// Of /proc/PID/stat.
struct ProcessStat {
  // Has begun to exit and was not reaped yet. A dying process closes its files
  // one after another, and a pidfd tells of its end only after that: in between
  // it looks alive, and what is sent to it is lost.
  bool is_exiting = false;
  // Since the machine was started; with the pid the name of a process that no
  // later one has.
  uint64_t start_ticks = 0;
};

// NOT_FOUND: there is no such process, or none that this one may see.
absl::StatusOr<ProcessStat> ReadProcessStat(pid_t pid);

// Whether the process that was started then (0: not known) runs. False also of
// one that cannot be looked at.
bool IsRunning(pid_t pid, uint64_t start_ticks);

// Whether it has ended, or begun to. False also when that cannot be seen.
bool HasEnded(pid_t pid, uint64_t start_ticks);

}  // namespace optstate::control

#endif  // OPTSTATE_SERVER_CONTROL_PROCESS_STAT_H_
