#include "server/access/memberships.h"

#include <spdlog/spdlog.h>

namespace optstate::access {

// The lock is not held while the tables are asked: they may be slow, and other
// questions have their answers already. Two callers may ask the same then.
template <typename Key, typename Value, typename Question>
absl::StatusOr<Value> Memberships::Ask(const Key& key, const Question& question,
                                       Answers<Key, Value>* answers) {
  {
    const absl::MutexLock lock(&mutex_);
    const auto found = answers->find(key);
    if (found != answers->end() && clock_() - found->second.at < kAgeMax) {
      return found->second.value;
    }
  }
  absl::StatusOr<Value> value = question(key);
  if (!value.ok()) {
    spdlog::warn("who may use a job cannot be looked up: {}",
                 value.status().ToString());
  }
  const absl::MutexLock lock(&mutex_);
  if (answers->size() >= kAnswersMax) answers->clear();
  answers->insert_or_assign(key, Answer<Value>{value, clock_()});
  return value;
}

bool Memberships::IsUser(uid_t uid, const std::string& user) {
  const absl::StatusOr<uid_t> found =
      Ask<std::string, uid_t>(user, tables_.find_user, &users_);
  return found.ok() && *found == uid;
}

bool Memberships::IsIn(uid_t uid, const std::string& group) {
  const absl::StatusOr<gid_t> found =
      Ask<std::string, gid_t>(group, tables_.find_group, &groups_);
  if (!found.ok()) return false;
  const absl::StatusOr<std::set<gid_t>> groups =
      Ask<uid_t, std::set<gid_t>>(uid, tables_.groups_of, &groups_of_);
  return groups.ok() && groups->contains(*found);
}

Memberships& MachineMemberships() {
  static auto* const memberships = new Memberships;
  return *memberships;
}

}  // namespace optstate::access
