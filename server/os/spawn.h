#ifndef OPTSTATE_SERVER_OS_SPAWN_H_
#define OPTSTATE_SERVER_OS_SPAWN_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace optstate::os {

// Number of the first inherited fd in the child; the others follow.
inline constexpr int kFirstInheritedFd = 3;

// Starts `executable` with `args` (args[0] is its name) as a child in a process
// group of its own, so that a terminal's Ctrl-C reaches the supervisor alone.
// The child has stdin, stdout and stderr, `fds` as kFirstInheritedFd,
// kFirstInheritedFd + 1, ..., and no other; stdout and stderr go to `output`
// (-1: this process's own); all signals are unblocked and at their defaults.
// RESOURCE_EXHAUSTED: fds, processes or memory are short.
absl::StatusOr<pid_t> Spawn(const std::string& executable,
                            const std::vector<std::string>& args,
                            absl::Span<const int> fds, int output = -1);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_SPAWN_H_
