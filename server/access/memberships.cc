#include "server/access/memberships.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/observe/peer_log.h"

namespace optstate::access {
namespace {

// Returns whether the tables have answered: that they have no such name is an
// answer as well.
bool IsAnswer(const absl::Status& status) {
  return status.ok() || absl::IsNotFound(status);
}

template <typename Answers>
void RemoveOldest(Answers* answers) {
  answers->erase(std::min_element(
      answers->begin(), answers->end(), [](const auto& a, const auto& b) {
        return a.second.asked_at < b.second.asked_at;
      }));
}

}  // namespace

// The lock is not held while the tables are asked: they may be slow, and other
// questions have their answers already. Two callers may ask the same then.
template <typename Key, typename Value, typename Question>
absl::StatusOr<Value> Memberships::Ask(const Key& key, const Question& question,
                                       Answers<Key, Value>* answers) {
  const absl::Time began_at = clock_();
  {
    const absl::MutexLock lock(&mutex_);
    const auto found = answers->find(key);
    if (found != answers->end() &&
        began_at < found->second.asked_at + kLifetime) {
      return found->second.value;
    }
  }
  absl::StatusOr<Value> value = question(key);
  if (!value.ok()) {
    observe::LogRepeated(
        spdlog::level::warn, "look-up failed", "users and groups",
        "a user or group cannot be looked up: {}", value.status().ToString());
  }
  // An answer counts from its end on: tables that take longer than kLifetime
  // would be waited for by every request else.
  const absl::Time ended_at = clock_();
  const absl::MutexLock lock(&mutex_);
  const auto found = answers->find(key);
  if (found == answers->end()) {
    if (answers->size() >= kAnswersMax) RemoveOldest(answers);
    answers->emplace(key, Answer<Value>{value, ended_at});
    return value;
  }
  Answer<Value>& last = found->second;
  // Another caller has asked meanwhile, and its answer may be the newer one.
  if (last.asked_at > began_at && IsAnswer(last.value.status())) {
    return last.value;
  }
  if (IsAnswer(value.status()) || !IsAnswer(last.value.status())) {
    last.value = value;
  }
  // The next question comes no sooner than after a successful one, so that a
  // source that hangs does not hold up every request.
  last.asked_at = ended_at;
  return last.value;
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
  const absl::StatusOr<std::vector<gid_t>> groups =
      Ask<uid_t, std::vector<gid_t>>(uid, tables_.groups_of, &groups_of_);
  return groups.ok() &&
         std::binary_search(groups->begin(), groups->end(), *found);
}

absl::StatusOr<std::vector<gid_t>> Memberships::GroupsOf(uid_t uid) {
  absl::StatusOr<std::vector<gid_t>> groups =
      Ask<uid_t, std::vector<gid_t>>(uid, tables_.groups_of, &groups_of_);
  if (groups.ok()) return groups;
  return absl::UnavailableError(absl::StrCat(
      "the groups of uid ", uid,
      " cannot be looked up, which quotas of groups need: ",
      groups.status().message(), ". Try again when `id ", uid, "` answers"));
}

Memberships& MachineMemberships() {
  static auto* const memberships = new Memberships;
  return *memberships;
}

}  // namespace optstate::access
