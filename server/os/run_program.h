#ifndef OPTSTATE_SERVER_OS_RUN_PROGRAM_H_
#define OPTSTATE_SERVER_OS_RUN_PROGRAM_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace optstate::os {

struct ProgramResult {
  int exit_status = -1;  // -signal when it was killed
  std::string output;    // stdout and stderr, 64 KiB of them at most
};

// Runs a program to its end. NOT_FOUND, PERMISSION_DENIED: the program does not
// exist or cannot be executed; DEADLINE_EXCEEDED: the program did not end in
// time, and was killed.
//
// Threads: thread-safe; blocks.
absl::StatusOr<ProgramResult> RunProgram(const std::string& path,
                                         const std::vector<std::string>& args,
                                         absl::Duration timeout);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_RUN_PROGRAM_H_
