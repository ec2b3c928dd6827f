#ifndef OPTSTATE_SERVER_SUPERVISOR_LOOK_BUDGET_H_
#define OPTSTATE_SERVER_SUPERVISOR_LOOK_BUDGET_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace optstate::supervisor {

// Bounds the time for which one peer keeps the supervisor's loop looking for
// ended sessions. A look reads the fds of every engine, and a peer who is at a
// limit causes one with each Hello: a flood of these would leave the loop no
// time for others.
//
// A peer may cause looks of kBurst together, and of kShare of the time after
// that.
//
// Threads: one at a time.
class LookBudget {
 public:
  static constexpr absl::Duration kBurst = absl::Milliseconds(200);
  static constexpr double kShare = 0.05;

  using Clock = std::function<absl::Time()>;
  explicit LookBudget(Clock clock = absl::Now) : clock_(std::move(clock)) {}

  // Returns whether the peer may cause another look.
  bool MayLook(const std::string& peer) const;
  // Takes the time of a look from the budget of the peer that has caused it.
  void Charge(const std::string& peer, absl::Duration took);

  // The number of peers whose budget is not full.
  size_t peers() const { return budgets_.size(); }

 private:
  struct Budget {
    absl::Duration left;
    absl::Time at;
  };

  static absl::Duration LeftOf(const Budget& budget, absl::Time now);

  const Clock clock_;
  std::map<std::string, Budget> budgets_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_LOOK_BUDGET_H_
