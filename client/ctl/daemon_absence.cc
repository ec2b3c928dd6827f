#include "client/ctl/daemon_absence.h"

#include <algorithm>

namespace optstate::ctl {

absl::Status DaemonAbsence::Judge(const absl::Status& result, absl::Time now) {
  if (!absl::IsUnavailable(result) && !absl::IsDeadlineExceeded(result)) {
    since_ = absl::InfiniteFuture();
    return result;
  }
  since_ = std::min(since_, now);
  return now - since_ < max_ ? absl::OkStatus() : result;
}

}  // namespace optstate::ctl
