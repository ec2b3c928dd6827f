#include "server/supervisor/restart_policy.h"

#include <algorithm>

namespace optstate::supervisor {
namespace {

constexpr absl::Duration kFirstDelay = absl::Milliseconds(100);
constexpr absl::Duration kDelayMax = absl::Seconds(5);
constexpr size_t kDoublingsMax = 10;  // beyond kDelayMax, and no overflow

}  // namespace

std::optional<absl::Duration> RestartPolicy::OnDeath(absl::Time now) {
  while (!restarts_.empty() && now - restarts_.front() >= window_) {
    restarts_.pop_front();
  }
  const size_t before = restarts_.size();
  if (before >= restarts_max_) return std::nullopt;
  restarts_.push_back(now);
  if (before == 0) return absl::ZeroDuration();
  const size_t doublings = std::min(before - 1, kDoublingsMax);
  return std::min(kFirstDelay * (1 << doublings), kDelayMax);
}

}  // namespace optstate::supervisor
