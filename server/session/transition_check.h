#ifndef OPTSTATE_SERVER_SESSION_TRANSITION_CHECK_H_
#define OPTSTATE_SERVER_SESSION_TRANSITION_CHECK_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate::session {

// Ends the process: "rank 3 cannot go from absent to awaited".
[[noreturn]] void AbortTransition(absl::string_view subject, uint64_t number,
                                  absl::string_view from, absl::string_view to);

// Ends the process when the table of a state's enum lacks a transition, for
// then an invariant is broken. Enums have the table, IsTransition(), and the
// names, NameOf(), beside them. `subject` and `number` say whose state it is.
// Allocates nothing.
template <typename State>
void CheckTransition(absl::string_view subject, uint64_t number, State from,
                     State to) {
  if (IsTransition(from, to)) return;
  AbortTransition(subject, number, NameOf(from), NameOf(to));
}

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSITION_CHECK_H_
