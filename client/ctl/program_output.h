#ifndef OPTSTATE_CLIENT_CTL_PROGRAM_OUTPUT_H_
#define OPTSTATE_CLIENT_CTL_PROGRAM_OUTPUT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace optstate::ctl {

// Runs a program of $PATH to its end and returns its stdout, `bytes_max` bytes
// at most; its stderr is dropped. NOT_FOUND: there is no such program;
// DEADLINE_EXCEEDED: it did not end in time, and was killed; ABORTED: it ended
// with another exit code than 0.
absl::StatusOr<std::string> OutputOf(const std::vector<std::string>& command,
                                     size_t bytes_max, absl::Duration timeout);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_PROGRAM_OUTPUT_H_
