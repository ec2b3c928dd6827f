#ifndef OPTSTATE_SERVER_OBSERVE_LOG_TEXT_H_
#define OPTSTATE_SERVER_OBSERVE_LOG_TEXT_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace optstate::observe {

// Limit of a line's length; the rest is cut and counted.
inline constexpr size_t kLineBytesMax = 2048;

// Escapes text for a log line: it stays on one line and cannot move a
// terminal's cursor. Control characters, of ASCII and of Unicode, and bytes
// that are no UTF-8 become \n, \r, \t or \xHH; other characters stay as they
// are.
std::string LogText(absl::string_view text);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_LOG_TEXT_H_
