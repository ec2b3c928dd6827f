#ifndef OPTSTATE_SERVER_OS_PRIORITY_H_
#define OPTSTATE_SERVER_OS_PRIORITY_H_

#include <sys/types.h>

#include "absl/status/status.h"

namespace optstate::os {

inline constexpr int kNiceMin = -20;
inline constexpr int kNiceMax = 19;

// Returns this process's nice value.
int OwnNice();

// Tries whether this process may lower its nice value: a capability, a limit
// and a security module can all decide. Raising it is always allowed.
bool MayRaisePriority();

// Sets the nice value of every thread of a process; threads that they start
// inherit it.
absl::Status SetNice(pid_t pid, int nice);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_PRIORITY_H_
