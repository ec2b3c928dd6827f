#ifndef OPTSTATE_SERVER_CONTROL_EXECUTABLE_H_
#define OPTSTATE_SERVER_CONTROL_EXECUTABLE_H_

#include <string>

#include "absl/status/statusor.h"

namespace optstate::control {

// Tells one build's file from another's, also when both have the same path, one
// after the other. To be compared, nothing else.
absl::StatusOr<std::string> ExecutableIdentity(const std::string& path);

}  // namespace optstate::control

#endif  // OPTSTATE_SERVER_CONTROL_EXECUTABLE_H_
