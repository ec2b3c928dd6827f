#ifndef OPTSTATE_CLIENT_CTL_PROGRESS_LINE_H_
#define OPTSTATE_CLIENT_CTL_PROGRESS_LINE_H_

#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace optstate::ctl {

// Shows, on stdout as a rule, how far something has come that takes long: on a
// terminal in one line that is rewritten, and cut where the terminal ends,
// elsewhere in a line now and then.
//
// Threads: not thread-safe.
class ProgressLine {
 public:
  // `is_silent`: shows nothing, because a program reads stdout. `fd`: stdout,
  // or stderr where stdout has the result.
  explicit ProgressLine(bool is_silent, int fd = STDOUT_FILENO);

  // Shows a text of whole lines, which stays, and how far it is (empty: the end
  // follows).
  void Show(absl::string_view lines, absl::string_view progress);
  // Ends the display with a text of whole lines. Returns whether all could be
  // written.
  absl::Status End(absl::string_view lines);

 private:
  absl::Status WriteText(absl::string_view text) const;

  const bool is_silent_;
  const int fd_;
  const bool is_terminal_;
  absl::Time next_line_at_ = absl::InfinitePast();
  absl::Status told_;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_PROGRESS_LINE_H_
