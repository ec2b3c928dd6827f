#ifndef OPTSTATE_SERVER_SESSION_MONOTONIC_CLOCK_H_
#define OPTSTATE_SERVER_SESSION_MONOTONIC_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace optstate::session {

// Returns the time of a clock that is never set, counted from some moment that
// means nothing: for intervals alone.
inline absl::Time MonotonicNow() {
  return absl::UnixEpoch() +
         absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_MONOTONIC_CLOCK_H_
