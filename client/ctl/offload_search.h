#ifndef OPTSTATE_CLIENT_CTL_OFFLOAD_SEARCH_H_
#define OPTSTATE_CLIENT_CTL_OFFLOAD_SEARCH_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/fraction_search.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// The means of a search: a daemon's job, or a test's.
struct OffloadControls {
  std::function<absl::StatusOr<v1::Job>()> look;
  // Sets the job's offload_fraction, from the next step on.
  std::function<absl::Status(double fraction)> set;
  // Waits until it is time to look again. Returns whether to give up.
  std::function<bool()> await;
  std::function<void(const std::string& text)> show;
};

// Finds the offload_fraction whose updates take the least time, while the job
// trains, and leaves it set. However long the trainer takes for its steps is
// waited. CANCELLED: `await` has returned true; then the fastest one so far is
// set, or the one before. FAILED_PRECONDITION: the job speculates, whose
// updates are not timed whole, or another job has come under its name. Other
// errors are those of the controls: the text says what is in force then.
absl::StatusOr<FractionSearch> SearchOffload(const std::string& job,
                                             const OffloadControls& controls);

// Returns "0.31 is the fastest of 9 that were tried, with 41.2 ms an update;
// the CPU alone takes 130.1 ms, devices alone 60.3 ms" of a search that is
// over.
std::string OffloadSearchText(const FractionSearch& search);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_OFFLOAD_SEARCH_H_
