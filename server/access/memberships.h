#ifndef OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_
#define OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/access/unix_names.h"

namespace optstate::access {

// Says who is which user and in which group, as this machine's tables have it.
// An answer is kept for kAgeMax: a directory service that is slow to answer is
// asked rarely, and a user who is added to a group, or removed from it, counts
// as such that much later. A question that fails is answered with no, and is
// in the log.
//
// Threads: thread-safe. Calls block on the tables.
class Memberships {
 public:
  static constexpr absl::Duration kAgeMax = absl::Seconds(10);
  // The number of answers that are kept; more than that forget all.
  static constexpr size_t kAnswersMax = 4096;

  // The machine's tables; tests have others.
  struct Tables {
    std::function<absl::StatusOr<uid_t>(const std::string&)> find_user =
        FindUser;
    std::function<absl::StatusOr<gid_t>(const std::string&)> find_group =
        FindGroup;
    std::function<absl::StatusOr<std::set<gid_t>>(uid_t)> groups_of = GroupsOf;
  };
  using Clock = std::function<absl::Time()>;

  Memberships() : Memberships(Tables{}) {}
  explicit Memberships(Tables tables, Clock clock = absl::Now)
      : tables_(std::move(tables)), clock_(std::move(clock)) {}

  // `user` and `group`: names or numbers.
  bool IsUser(uid_t uid, const std::string& user);
  bool IsIn(uid_t uid, const std::string& group);

 private:
  template <typename Value>
  struct Answer {
    absl::StatusOr<Value> value;
    absl::Time at;
  };
  template <typename Key, typename Value>
  using Answers = std::map<Key, Answer<Value>>;

  template <typename Key, typename Value, typename Question>
  absl::StatusOr<Value> Ask(const Key& key, const Question& question,
                            Answers<Key, Value>* answers);

  const Tables tables_;
  const Clock clock_;
  absl::Mutex mutex_;
  // Guarded by mutex_, as Ask() uses them.
  Answers<std::string, uid_t> users_;
  Answers<std::string, gid_t> groups_;
  Answers<uid_t, std::set<gid_t>> groups_of_;
};

// The tables of this machine.
Memberships& MachineMemberships();

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_
