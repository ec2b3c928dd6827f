#include "server/access/memberships.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace optstate::access {

Memberships::Memberships(LookUp look_up, std::function<absl::Time()> clock)
    : look_up_(std::move(look_up)), clock_(std::move(clock)) {}

absl::StatusOr<std::vector<gid_t>> Memberships::GroupsOf(uid_t uid) {
  const absl::Time now = clock_();
  {
    const absl::MutexLock lock(&mutex_);
    const auto found = answers_.find(uid);
    if (found != answers_.end() && now < found->second.asked_at + kLifetime) {
      return found->second.groups;
    }
  }
  absl::StatusOr<std::vector<gid_t>> groups = look_up_(uid);
  const absl::MutexLock lock(&mutex_);
  if (groups.ok()) {
    Remember(uid, {*groups, now});
    return groups;
  }
  const auto found = answers_.find(uid);
  if (found == answers_.end()) {
    return absl::UnavailableError(absl::StrCat(
        "the groups of uid ", uid,
        " cannot be looked up, which quotas of groups need: ",
        groups.status().message(), ". Try again when `id ", uid, "` answers"));
  }
  // The next question comes no sooner than after a successful one, so that a
  // source that hangs does not hold up every request.
  found->second.asked_at = now;
  return found->second.groups;
}

void Memberships::Remember(uid_t uid, Answer answer) {
  if (answers_.size() >= kUsersMax && !answers_.contains(uid)) {
    answers_.erase(std::min_element(
        answers_.begin(), answers_.end(), [](const auto& a, const auto& b) {
          return a.second.asked_at < b.second.asked_at;
        }));
  }
  answers_[uid] = std::move(answer);
}

}  // namespace optstate::access
