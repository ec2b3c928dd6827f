#ifndef OPTSTATE_SERVER_ADMIN_USER_REPORT_H_
#define OPTSTATE_SERVER_ADMIN_USER_REPORT_H_

#include <sys/types.h>

#include <optional>

#include "absl/status/statusor.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/config.pb.h"
#include "server/access/quotas.h"

namespace optstate::admin {

// Whom a report is about, and for whom it is. Neither a user nor a group: all.
struct UsersAsked {
  std::optional<uid_t> user = std::nullopt;
  std::optional<gid_t> group = std::nullopt;
  // The one who asks may see the names of all users' jobs.
  bool shows_all_names = false;
};

// Describes what users' jobs take and may take: bytes by the jobs' files, as
// quotas are enforced by, and the rest by `jobs`. A job whose engine did not
// answer counts without sessions, and is named. NOT_FOUND: the group has no
// quota; UNAVAILABLE: the system's tables of users and groups cannot be read.
absl::StatusOr<v1::ListUsersReply> DescribeUsers(const v1::DaemonConfig& config,
                                                 access::Quotas* quotas,
                                                 const v1::ListJobsReply& jobs,
                                                 const UsersAsked& asked);

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_USER_REPORT_H_
