// The call of the Admin service that describes users and quotas.

#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/access/unix_names.h"
#include "server/admin/admin_service.h"
#include "server/admin/described_jobs.h"
#include "server/admin/shown_jobs.h"
#include "server/admin/user_report.h"

namespace optstate::admin {
namespace {

// Finds whom the request is about, as far as the caller may ask. nullopt: all.
absl::StatusOr<std::optional<uid_t>> UserOf(const v1::ListUsersRequest& request,
                                            const access::Caller& caller) {
  const bool asks_for_one = !request.user().empty();
  if (caller.role == access::Role::kOperator) {
    if (!asks_for_one) return std::optional<uid_t>();
    OPTSTATE_ASSIGN_OR_RETURN(const uid_t user,
                              access::FindUser(request.user()));
    return std::optional<uid_t>(user);
  }
  const bool asks_for_another =
      asks_for_one &&
      access::FindUser(request.user()).value_or(access::Caller::kNobody) !=
          caller.uid;
  if (!asks_for_another) return std::optional<uid_t>(caller.uid);
  return absl::PermissionDeniedError(absl::StrCat(
      caller.name(), " asks for user ", request.user(),
      ", and sees its own user alone: it takes an operator (root, the daemon's "
      "user, access.operator_groups, an identity with that role)"));
}

}  // namespace

absl::StatusOr<v1::ListUsersReply> AdminService::ListUsers(
    const v1::ListUsersRequest& request, const access::Caller& caller,
    absl::Time deadline) {
  UsersAsked asked;
  OPTSTATE_ASSIGN_OR_RETURN(asked.user, UserOf(request, caller));
  asked.shows_all_names = caller.role == access::Role::kOperator;
  // Sums have all jobs, whoever may look at them; names are left out by user.
  const std::shared_ptr<const DescribedJobs::Jobs> jobs =
      described_.All(deadline);
  return DescribeUsers(info_.config, &quotas_, ListOf(**jobs), asked);
}

}  // namespace optstate::admin
