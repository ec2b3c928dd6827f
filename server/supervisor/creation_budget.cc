#include "server/supervisor/creation_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace optstate::supervisor {

double CreationBudget::LeftOf(const Budget& budget, absl::Time now) {
  const absl::Duration passed = std::max(now - budget.at, absl::ZeroDuration());
  return std::min(kBurst,
                  budget.left + kPerSecond * absl::ToDoubleSeconds(passed));
}

absl::Status CreationBudget::Take(const std::string& user) {
  const absl::Time now = clock_();
  // A full budget equals that of a user who is not known.
  std::erase_if(budgets_, [now](const auto& each) {
    return LeftOf(each.second, now) >= kBurst;
  });
  const auto found = budgets_.find(user);
  const double left =
      found == budgets_.end() ? kBurst : LeftOf(found->second, now);
  if (left < 1) {
    // A client knows by the words "connect again" that it may.
    return absl::UnavailableError(absl::StrCat(
        user, " has had more than ", kBurst,
        " jobs made in a short time, and may have ", kPerSecond,
        " a second made now: connect again in a moment, or attach to jobs that "
        "are there"));
  }
  budgets_[user] = {.left = left - 1, .at = now};
  return absl::OkStatus();
}

}  // namespace optstate::supervisor
