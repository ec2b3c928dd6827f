#ifndef OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_
#define OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/access/unix_names.h"

namespace optstate::access {

// Says who is which user and in which groups, as this machine's tables have it.
//
// The tables may be on another machine, so an answer counts for kLifetime, and
// so does a question that failed: a directory server that is slow to answer is
// asked rarely, and a user who is added to a group, or removed from it, counts
// as such that much later. While the tables cannot be read, the last answer
// goes on counting, also that there is no such name. A user or name that could
// never be looked up is no member for IsUser() and IsIn(), which say who may
// use a job, and UNAVAILABLE for GroupsOf(), which says what bounds a user.
// Each failure is in the log.
//
// Threads: thread-safe. Calls block on the tables, and hold no lock meanwhile.
class Memberships {
 public:
  // Returns a user's groups, ascending.
  using LookUp = std::function<absl::StatusOr<std::vector<gid_t>>(uid_t)>;
  using Clock = std::function<absl::Time()>;

  static constexpr absl::Duration kLifetime = absl::Seconds(10);
  // The answers of each kind that are remembered. Further ones push out the
  // oldest.
  static constexpr size_t kAnswersMax = 4096;

  // The machine's tables; tests have others.
  struct Tables {
    std::function<absl::StatusOr<uid_t>(const std::string&)> find_user =
        FindUser;
    std::function<absl::StatusOr<gid_t>(const std::string&)> find_group =
        FindGroup;
    LookUp groups_of = FindGroupsOf;
  };

  Memberships() : Memberships(Tables{}) {}
  explicit Memberships(Tables tables, Clock clock = absl::Now)
      : tables_(std::move(tables)), clock_(std::move(clock)) {}

  // `user` and `group`: names or numbers.
  bool IsUser(uid_t uid, const std::string& user);
  bool IsIn(uid_t uid, const std::string& group);
  // Returns the groups of a user, ascending. UNAVAILABLE: the tables cannot be
  // read, and never could for this user.
  absl::StatusOr<std::vector<gid_t>> GroupsOf(uid_t uid);

 private:
  template <typename Value>
  struct Answer {
    absl::StatusOr<Value> value;
    absl::Time asked_at;
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
  Answers<uid_t, std::vector<gid_t>> groups_of_;
};

// The tables of this machine.
Memberships& MachineMemberships();

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_
