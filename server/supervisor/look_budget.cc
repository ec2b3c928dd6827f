#include "server/supervisor/look_budget.h"

#include <algorithm>

namespace optstate::supervisor {

absl::Duration LookBudget::LeftOf(const Budget& budget, absl::Time now) {
  const absl::Duration passed = std::max(now - budget.at, absl::ZeroDuration());
  return std::min(kBurst, budget.left + passed * kShare);
}

bool LookBudget::MayLook(const std::string& peer) const {
  const auto found = budgets_.find(peer);
  return found == budgets_.end() ||
         LeftOf(found->second, clock_()) > absl::ZeroDuration();
}

void LookBudget::Charge(const std::string& peer, absl::Duration took) {
  const absl::Time now = clock_();
  // A full budget equals that of a peer who is not known.
  std::erase_if(budgets_, [now](const auto& each) {
    return LeftOf(each.second, now) >= kBurst;
  });
  const auto found = budgets_.find(peer);
  const absl::Duration left =
      found == budgets_.end() ? kBurst : LeftOf(found->second, now);
  budgets_[peer] = {.left = left - took, .at = now};
}

}  // namespace optstate::supervisor
