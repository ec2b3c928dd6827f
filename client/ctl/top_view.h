#ifndef OPTSTATE_CLIENT_CTL_TOP_VIEW_H_
#define OPTSTATE_CLIENT_CTL_TOP_VIEW_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/ctl/terminal_fit.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// Holds what a daemon said of itself and of its jobs at one time.
struct TopSample {
  absl::Time at;
  v1::ServerStatus status;
  v1::ListJobsReply jobs;
};

// Renders the daemon in a line or two, and each job in a row: how many steps it
// took a second since the sample before, and what the last ones spent their
// time on. `before`: null for the first sample, which has no rates. A number
// that is not known is "?"; one that a job does not have is "-".
//
// The jobs that most need somebody to look come first: FAILED; recovering, or
// without an answer; some ranks are missing; all are attached; none is. Among
// equals the job with the most state is first. Jobs and columns that the
// terminal has no room for are left out.
absl::StatusOr<std::string> RenderTop(const TopSample* before,
                                      const TopSample& now, bool wide,
                                      const TerminalSize& terminal);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_TOP_VIEW_H_
