#ifndef OPTSTATE_CLIENT_CTL_TERMINAL_FIT_H_
#define OPTSTATE_CLIENT_CTL_TERMINAL_FIT_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace optstate::ctl {

// The size of a terminal in characters. 0: not known, and so no limit.
struct TerminalSize {
  size_t rows = 0;
  size_t columns = 0;
};

// Returns the size of the terminal that `fd` is; zeros when it is none, or one
// that does not say.
TerminalSize SizeOfTerminal(int fd);

// Returns the beginning of a line that takes at most so many columns, without a
// part of a character. A character that may be two columns wide counts as two.
absl::string_view CutToWidth(absl::string_view line, size_t columns);

// Returns the lines of a text that a terminal has room for, above a free row
// for the cursor, each cut to the width. Each line after the first `head` is a
// job's; when not all of them have room, the last line says how many more there
// are.
std::string FitToTerminal(absl::string_view text, size_t head,
                          const TerminalSize& size);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_TERMINAL_FIT_H_
