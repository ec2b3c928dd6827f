#include "server/observe/event_budget.h"

#include <algorithm>

namespace optstate::observe {

std::optional<uint64_t> EventBudget::Take() {
  const absl::Time now = clock_();
  const absl::MutexLock lock(&mutex_);
  // A clock that was set back refills nothing.
  const absl::Duration passed = std::max(now - at_, absl::ZeroDuration());
  left_ = std::min(burst_, left_ + absl::FDivDuration(passed, interval_));
  at_ = now;
  if (left_ < 1) {
    ++left_out_;
    return std::nullopt;
  }
  left_ -= 1;
  return std::exchange(left_out_, 0);
}

}  // namespace optstate::observe
