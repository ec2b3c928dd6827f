#include "client/ctl/terminal_fit.h"

#include <sys/ioctl.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace optstate::ctl {
namespace {

// Returns the length of the character that `text` begins with. A byte that is
// no UTF-8 counts as one.
size_t CharacterBytes(absl::string_view text) {
  const auto first = static_cast<uint8_t>(text[0]);
  const size_t size = first >= 0xf0   ? 4
                      : first >= 0xe0 ? 3
                      : first >= 0xc0 ? 2
                                      : 1;
  if (size > text.size()) return 1;
  for (size_t i = 1; i < size; ++i) {
    if ((static_cast<uint8_t>(text[i]) & 0xc0) != 0x80) return 1;
  }
  return size;
}

}  // namespace

TerminalSize SizeOfTerminal(int fd) {
  winsize size = {};
  if (::ioctl(fd, TIOCGWINSZ, &size) != 0) return {};
  return {size.ws_row, size.ws_col};
}

absl::string_view CutToWidth(absl::string_view line, size_t columns) {
  size_t taken = 0;
  size_t end = 0;
  while (end < line.size()) {
    const size_t bytes = CharacterBytes(line.substr(end));
    // Characters of two columns have three bytes or four.
    taken += bytes > 2 ? 2 : 1;
    if (taken > columns) break;
    end += bytes;
  }
  return line.substr(0, end);
}

std::string FitToTerminal(absl::string_view text, size_t head,
                          const TerminalSize& size) {
  std::vector<absl::string_view> lines =
      absl::StrSplit(absl::StripSuffix(text, "\n"), '\n');
  std::string more;
  if (size.rows != 0) {
    const size_t room = std::max<size_t>(size.rows, 2) - 1;
    if (lines.size() > room && lines.size() > head) {
      const size_t left_out = lines.size() - std::max(room - 1, head);
      more = absl::StrCat("and ", left_out, " more job",
                          left_out == 1 ? "" : "s", " (optctl get jobs)");
      lines.resize(room - 1);
      lines.push_back(more);
    }
    lines.resize(std::min(lines.size(), room));
  }
  std::string fit;
  for (const absl::string_view line : lines) {
    absl::StrAppend(
        &fit, size.columns == 0 ? line : CutToWidth(line, size.columns), "\n");
  }
  return fit;
}

}  // namespace optstate::ctl
