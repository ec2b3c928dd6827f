#ifndef OPTSTATE_SERVER_OBSERVE_LOG_TEXT_H_
#define OPTSTATE_SERVER_OBSERVE_LOG_TEXT_H_

#include <cstddef>
#include <cstdint>
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

// Returns the length of the character of UTF-8 that `text` begins with, and
// sets its number; 0: there is none, or it is not well-formed.
size_t DecodeCharacter(absl::string_view text, uint32_t* code);

// Returns whether the character moves a cursor, or ends a line for some
// program: C0, DEL, C1, line and paragraph separator.
bool IsControl(uint32_t code);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_LOG_TEXT_H_
