#ifndef OPTSTATE_SERVER_SUPERVISOR_CREATION_BUDGET_H_
#define OPTSTATE_SERVER_SUPERVISOR_CREATION_BUDGET_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace optstate::supervisor {

// Bounds how often one user has jobs made. Each costs the supervisor's loop
// time, looks at the tables of users, writes to the log and starts an engine,
// so a flood of jobs that are made and end again would take all of these from
// others, however few jobs the user may have at a time.
//
// A user may have kBurst jobs made at once, and kPerSecond of them after that.
//
// Threads: one at a time.
class CreationBudget {
 public:
  static constexpr double kBurst = 100;
  static constexpr double kPerSecond = 4;

  using Clock = std::function<absl::Time()>;
  explicit CreationBudget(Clock clock = absl::Now) : clock_(std::move(clock)) {}

  // Takes one job from a user's budget. UNAVAILABLE: it is used up; clients
  // connect again for as long as they wait for a daemon.
  absl::Status Take(const std::string& user);

  // The number of users whose budget is not full.
  size_t users() const { return budgets_.size(); }

 private:
  struct Budget {
    double left = kBurst;
    absl::Time at;
  };

  static double LeftOf(const Budget& budget, absl::Time now);

  const Clock clock_;
  std::map<std::string, Budget> budgets_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_CREATION_BUDGET_H_
