#include "client/ctl/progress_line.h"

#include <cstddef>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/command.h"
#include "client/ctl/terminal_fit.h"

namespace optstate::ctl {
namespace {

// Interval between lines of progress where each stays.
constexpr absl::Duration kLineInterval = absl::Seconds(10);
// Clears the last line of a terminal.
constexpr char kRewrite[] = "\r\033[K";

}  // namespace

ProgressLine::ProgressLine(bool is_silent, int fd)
    : is_silent_(is_silent), fd_(fd), is_terminal_(::isatty(fd) == 1) {}

absl::Status ProgressLine::WriteText(absl::string_view text) const {
  if (fd_ == STDOUT_FILENO) return Write(text);
  std::cerr << text << std::flush;
  return std::cerr.good() ? absl::OkStatus()
                          : absl::InternalError("stderr: cannot write");
}

void ProgressLine::Show(absl::string_view lines, absl::string_view progress) {
  if (is_silent_) return;
  std::string text;
  if (is_terminal_) {
    // Only the last row of a line that takes several would be cleared.
    const size_t columns = SizeOfTerminal(fd_).columns;
    if (columns > 0) progress = CutToWidth(progress, columns);
    text = absl::StrCat(kRewrite, lines, progress);
  } else {
    text = std::string(lines);
    if (!progress.empty() && absl::Now() >= next_line_at_) {
      next_line_at_ = absl::Now() + kLineInterval;
      absl::StrAppend(&text, progress, "\n");
    }
  }
  if (!text.empty()) told_.Update(WriteText(text));
}

absl::Status ProgressLine::End(absl::string_view lines) {
  if (is_silent_) return told_;
  const std::string text = absl::StrCat(is_terminal_ ? kRewrite : "", lines);
  if (!text.empty()) told_.Update(WriteText(text));
  return told_;
}

}  // namespace optstate::ctl
