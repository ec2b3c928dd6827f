#ifndef OPTSTATE_SERVER_SUPERVISOR_RESTART_POLICY_H_
#define OPTSTATE_SERVER_SUPERVISOR_RESTART_POLICY_H_

#include <cstdint>
#include <deque>
#include <optional>

#include "absl/time/time.h"

namespace optstate::supervisor {

// Decides when an engine that died is started again.
//
// The first restart within the window is immediate, because ranks are waiting;
// each further one waits twice as long as the one before (100 ms to 5 s), so
// that an engine that cannot start does not take the machine's time.
class RestartPolicy {
 public:
  RestartPolicy(uint32_t restarts_max, absl::Duration window)
      : restarts_max_(restarts_max), window_(window) {}

  // Returns the delay before the next start; to be called at each death.
  // nullopt: restarts_max restarts have been used up within the window.
  std::optional<absl::Duration> OnDeath(absl::Time now);

  // Forgets every restart.
  void Reset() { restarts_.clear(); }

 private:
  const uint32_t restarts_max_;
  const absl::Duration window_;
  std::deque<absl::Time> restarts_;  // within the window, oldest first
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_RESTART_POLICY_H_
