#ifndef OPTSTATE_TESTS_CRASH_POLL_UNTIL_H_
#define OPTSTATE_TESTS_CRASH_POLL_UNTIL_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace optstate::crash {

// Calls `done` every few microseconds until it holds; DEADLINE_EXCEEDED naming
// `what` after a time that nothing takes.
absl::Status PollUntil(absl::string_view what, absl::FunctionRef<bool()> done);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_POLL_UNTIL_H_
