#include "server/admin/kept_answers.h"

#include <algorithm>

namespace optstate::admin {
namespace {

// Returns whether something of that time is so young. A clock that was set back
// makes nothing young.
bool IsYoung(absl::Time at, absl::Time now, absl::Duration age_max) {
  return at <= now && now - at <= age_max;
}

}  // namespace

std::shared_ptr<const v1::Job> KeptAnswers::Find(const std::string& job,
                                                 pid_t engine,
                                                 absl::Duration age_max) const {
  const absl::Time now = clock_();
  const absl::MutexLock lock(&mutex_);
  const auto found = kept_.find(job);
  if (found == kept_.end() || found->second.engine != engine) return nullptr;
  const Kept& kept = found->second;
  return IsYoung(kept.asked_at, now, std::min(age_max, kAgeMax)) ? kept.answer
                                                                 : nullptr;
}

void KeptAnswers::Keep(const std::string& job, pid_t engine,
                       absl::Time asked_at, v1::Job answer) {
  const absl::Time now = clock_();
  auto shared = std::make_shared<const v1::Job>(std::move(answer));
  const absl::MutexLock lock(&mutex_);
  DropOld(now);
  Kept& kept = kept_[job];
  const bool is_newer = kept.answer != nullptr && kept.engine == engine &&
                        kept.asked_at > asked_at && kept.asked_at <= now;
  if (!is_newer) kept = {engine, asked_at, std::move(shared)};
}

size_t KeptAnswers::size() const {
  const absl::MutexLock lock(&mutex_);
  return kept_.size();
}

// Looks at all of them once in kAgeMax, so that this costs each call little.
void KeptAnswers::DropOld(absl::Time now) {
  if (IsYoung(dropped_at_, now, kAgeMax)) return;
  dropped_at_ = now;
  std::erase_if(kept_, [now](const auto& each) {
    return !IsYoung(each.second.asked_at, now, kAgeMax);
  });
}

}  // namespace optstate::admin
