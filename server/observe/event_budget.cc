#include "server/observe/event_budget.h"

#include <algorithm>

namespace optstate::observe {

std::optional<uint64_t> EventBudget::Take(uint64_t already_left_out) {
  const absl::MutexLock lock(&mutex_);
  Refill();
  left_out_ += already_left_out;
  if (left_ < 1) {
    ++left_out_;
    return std::nullopt;
  }
  left_ -= 1;
  return std::exchange(left_out_, 0);
}

uint64_t EventBudget::TakeLeftOut() {
  const absl::MutexLock lock(&mutex_);
  Refill();
  if (left_out_ == 0 || left_ < 1) return 0;
  left_ -= 1;
  return std::exchange(left_out_, 0);
}

void EventBudget::Refill() {
  const absl::Time now = clock_();
  // A clock that was set back refills nothing.
  const absl::Duration passed = std::max(now - at_, absl::ZeroDuration());
  left_ = std::min(burst_, left_ + absl::FDivDuration(passed, interval_));
  at_ = now;
}

}  // namespace optstate::observe
