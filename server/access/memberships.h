#ifndef OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_
#define OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/access/unix_names.h"

namespace optstate::access {

// The groups that users are in. The system's tables may be on another machine,
// so an answer counts for a minute; when they cannot be read after that, the
// last answer goes on counting.
//
// Threads: thread-safe. No lock is held while the tables are read.
class Memberships {
 public:
  // Returns a user's groups, ascending.
  using LookUp = std::function<absl::StatusOr<std::vector<gid_t>>(uid_t)>;

  static constexpr absl::Duration kLifetime = absl::Minutes(1);
  // The users that are remembered. Further ones push out the oldest answer.
  static constexpr size_t kUsersMax = 4096;

  explicit Memberships(LookUp look_up = FindGroupsOf,
                       std::function<absl::Time()> clock = absl::Now);

  // Returns the groups of a user, ascending. UNAVAILABLE: the tables cannot be
  // read, and never could for this user.
  absl::StatusOr<std::vector<gid_t>> GroupsOf(uid_t uid);

 private:
  struct Answer {
    std::vector<gid_t> groups;
    absl::Time asked_at;
  };

  void Remember(uid_t uid, Answer answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const LookUp look_up_;
  const std::function<absl::Time()> clock_;
  absl::Mutex mutex_;
  std::map<uid_t, Answer> answers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_MEMBERSHIPS_H_
