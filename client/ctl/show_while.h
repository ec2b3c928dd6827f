#ifndef OPTSTATE_CLIENT_CTL_SHOW_WHILE_H_
#define OPTSTATE_CLIENT_CTL_SHOW_WHILE_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/ctl/admin_client.h"
#include "client/ctl/command.h"

namespace optstate::ctl {

// The times of a display: how often it looks, and how long it shows nothing,
// because what takes no longer says its end alone.
struct ShowTimes {
  absl::Duration interval;
  absl::Duration quiet = absl::ZeroDuration();
};

// Shows how far something is, until it is over: on a terminal in one line, in a
// pipe in a line now and then. `is_over` waits for the end that long at the
// most, and says whether it has come; it also ends at --timeout. `look` returns
// the text, with the time that is left until then. Its client has so short a
// timeout that no question outlasts --timeout; null: there is no time for one.
// Returns whether all could be written.
absl::Status ShowWhile(
    const Context& context, const ShowTimes& times,
    absl::FunctionRef<bool(absl::Duration)> is_over,
    absl::FunctionRef<std::string(AdminClient*, absl::Duration)> look);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_SHOW_WHILE_H_
