#ifndef OPTSTATE_SERVER_ACCESS_QUOTAS_H_
#define OPTSTATE_SERVER_ACCESS_QUOTAS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "optstate/v1/config.pb.h"
#include "server/access/memberships.h"

namespace optstate::access {

// A quota of a group that a user is in.
struct GroupQuota {
  gid_t gid = 0;
  v1::Quota quota;
};

// Returns the first of the groups with the largest weight; null: none has one.
const GroupQuota* Heaviest(const std::vector<GroupQuota>& groups);

// The quotas that a user's jobs have to keep within. The default concerns no
// user and bounds nothing.
struct UserBounds {
  std::optional<uid_t> uid = std::nullopt;
  // The user's own quota; empty: the user has none.
  v1::Quota own = {};
  // In force: the user's own quota, with the limits of all users where that
  // says nothing. 0: no limit.
  v1::Quota in_force = {};
  std::vector<GroupQuota> groups = {};
};

// Returns whether this is root or the daemon's own user, whom no quota concerns
// and for whom others leave room.
bool IsOperator(uid_t uid);

// Names a limit of a quota for an error, e.g. "quota of group research:
// jobs_max is 10".
std::string QuotaText(const v1::Quota& quota, absl::string_view field,
                      uint64_t max);

// The quotas of users and groups of a configuration.
//
// A quota of a name that the machine does not know any more concerns nobody,
// and is logged. When the tables of names cannot be read, questions are
// answered with UNAVAILABLE until they can.
//
// Threads: thread-safe. A question may wait for the system's tables, see
// Memberships.
class Quotas {
 public:
  using All = google::protobuf::RepeatedPtrField<v1::Quota>;

  static constexpr uint32_t kDefaultWeight = 100;

  // `limits`: those of all users.
  Quotas(v1::Limits limits, const All& quotas,
         Memberships::LookUp groups_of = FindGroupsOf);
  explicit Quotas(const v1::DaemonConfig& config)
      : Quotas(config.limits(), config.quotas()) {}

  // Returns what bounds the jobs of a user.
  absl::StatusOr<UserBounds> BoundsOf(uid_t uid);
  // Returns the quotas of the groups that a user is in; operators are in none.
  absl::StatusOr<std::vector<GroupQuota>> GroupsOf(uid_t uid);
  // Returns the entries that may bound the jobs of a user: those of groups, and
  // of users this one's own and those whose number is not known. Waits for no
  // table.
  All ThatMayConcern(uid_t uid) const;
  // Adds up what users have, over the members of each of the groups.
  absl::StatusOr<std::vector<uint64_t>> SumOverMembers(
      const std::vector<GroupQuota>& groups,
      const std::map<uid_t, uint64_t>& by_user);

  // Returns the quotas of users, by number, and those of groups.
  absl::StatusOr<std::map<uid_t, v1::Quota>> OfUsers();
  absl::StatusOr<std::vector<GroupQuota>> OfGroups();

  // Returns the weight of the user's part of cores and disks: its own, else the
  // largest of its groups, else the default, as while the tables of names
  // cannot be read.
  uint32_t WeightOf(uid_t uid);
  // Returns the largest weight that a user can have.
  uint32_t LargestWeight() const;

 private:
  // One entry of the configuration.
  struct Entry {
    v1::Quota quota;
    std::optional<uint32_t> id;  // of the user or group
    bool is_absent = false;      // the machine has no such name
  };

  // Finds the numbers that are not known yet.
  absl::Status FindNumbers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns a user's own quota; empty: none.
  v1::Quota OwnQuotaOf(uid_t uid) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const v1::Limits limits_;
  Memberships memberships_;
  mutable absl::Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_QUOTAS_H_
