#ifndef OPTSTATE_SERVER_ACCESS_UNIX_ROLES_H_
#define OPTSTATE_SERVER_ACCESS_UNIX_ROLES_H_

#include <sys/types.h>

#include <map>
#include <vector>

#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "server/access/caller.h"

namespace optstate::access {

// The roles that groups give to users at a unix socket: access.operator_groups,
// access.trainer_groups and access.viewer_groups. A process has the highest
// role of its groups. Without one of them it is a trainer where neither
// trainer_groups nor viewer_groups are set, and has no role where one is.
//
// Threads: immutable and thread-safe.
class UnixRoles {
 public:
  // No group has a role, and every user is a trainer.
  UnixRoles() = default;
  // NOT_FOUND names the setting and its group that this machine does not have.
  static absl::StatusOr<UnixRoles> Find(const v1::AccessSettings& access);

  // Returns the role of a process that is in these groups.
  Role Of(const std::vector<gid_t>& groups) const;
  // Returns the role of the process at the other end of a unix socket, by the
  // groups that it was in when it connected; its own group is `gid`
  // (SO_PEERCRED).
  Role OfPeer(int socket, gid_t gid) const;

 private:
  std::map<gid_t, Role> by_group_;
  Role without_group_ = Role::kTrainer;
};

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_UNIX_ROLES_H_
