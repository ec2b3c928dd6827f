#ifndef OPTSTATE_SERVER_OS_EXECUTABLE_H_
#define OPTSTATE_SERVER_OS_EXECUTABLE_H_

#include <string>

#include "absl/status/statusor.h"

namespace optstate::os {

// Identifies one build's file, also when another build's file has the same path
// later. The result is only to be compared.
absl::StatusOr<std::string> ExecutableIdentity(const std::string& path);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_EXECUTABLE_H_
