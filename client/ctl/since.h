#ifndef OPTSTATE_CLIENT_CTL_SINCE_H_
#define OPTSTATE_CLIENT_CTL_SINCE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace optstate::ctl {

// Parses how far an operator looks back: "90s", "10m", "1h30m", "2d".
// INVALID_ARGUMENT names these forms.
absl::StatusOr<absl::Duration> ParseSince(absl::string_view text);

// Checks the option --since for CLI11: the error's text, or "".
std::string CheckSince(const std::string& text);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_SINCE_H_
