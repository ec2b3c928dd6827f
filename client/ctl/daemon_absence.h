#ifndef OPTSTATE_CLIENT_CTL_DAEMON_ABSENCE_H_
#define OPTSTATE_CLIENT_CTL_DAEMON_ABSENCE_H_

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace optstate::ctl {

// Decides how long a command that lasts waits for a daemon that does not
// answer, as while another build takes its place.
//
// Threads: not thread-safe.
class DaemonAbsence {
 public:
  explicit DaemonAbsence(absl::Duration max) : max_(max) {}

  // Takes the result of a call at this time. Returns OK when the command goes
  // on: the call was OK, or the daemon has not been away for too long. Else
  // returns the result.
  absl::Status Judge(const absl::Status& result, absl::Time now);

 private:
  const absl::Duration max_;
  absl::Time since_ = absl::InfiniteFuture();  // infinite: it is there
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_DAEMON_ABSENCE_H_
