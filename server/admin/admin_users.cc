// The call of the Admin service that describes users and quotas.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/access/quotas.h"
#include "server/access/unix_names.h"
#include "server/admin/admin_service.h"
#include "server/admin/described_jobs.h"
#include "server/admin/shown_jobs.h"
#include "server/admin/user_report.h"

namespace optstate::admin {
namespace {

absl::Status CheckAsksForOne(const v1::ListUsersRequest& request) {
  const int asked = (request.user().empty() ? 0 : 1) + (request.own() ? 1 : 0) +
                    (request.group().empty() ? 0 : 1);
  if (asked <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "several of user, own and group are set: ask for one of them");
}

absl::Status NotForCaller(const access::Caller& caller,
                          const std::string& other, const std::string& own) {
  return absl::PermissionDeniedError(
      absl::StrCat(caller.name(), " asks for ", other, ", and sees ", own,
                   " alone: it takes an operator (root, the daemon's user, "
                   "access.operator_groups, an identity with that role)"));
}

// Finds the user whom the request is about, as far as the caller may ask.
// nullopt: all.
absl::StatusOr<std::optional<uid_t>> UserOf(const v1::ListUsersRequest& request,
                                            const access::Caller& caller) {
  const bool asks_for_one = !request.user().empty();
  if (request.own()) return std::optional<uid_t>(caller.uid);
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
  return NotForCaller(caller, absl::StrCat("user ", request.user()),
                      "its own user");
}

// Finds the group that the request is about. A caller who is no operator does
// not learn which other groups there are.
absl::StatusOr<gid_t> GroupOf(const std::string& name,
                              const access::Caller& caller,
                              access::Quotas* quotas) {
  const absl::StatusOr<gid_t> group = access::FindGroup(name);
  if (caller.role == access::Role::kOperator) return group;
  // A caller who may not see the group learns no more than that; a fault of the
  // look-up is another matter.
  if (!group.ok() && !absl::IsNotFound(group.status())) return group;
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<access::GroupQuota> own,
                            quotas->GroupsOf(caller.uid));
  const bool is_own =
      group.ok() && absl::c_any_of(own, [&](const access::GroupQuota& each) {
        return each.gid == *group;
      });
  if (is_own) return group;
  return NotForCaller(caller, absl::StrCat("group ", name),
                      "groups with a quota that its user is in");
}

}  // namespace

absl::StatusOr<v1::ListUsersReply> AdminService::ListUsers(
    const v1::ListUsersRequest& request, const access::Caller& caller,
    absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(CheckAsksForOne(request));
  UsersAsked asked;
  if (request.group().empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(asked.user, UserOf(request, caller));
  } else {
    OPTSTATE_ASSIGN_OR_RETURN(asked.group,
                              GroupOf(request.group(), caller, &quotas_));
  }
  asked.shows_all_names = caller.role == access::Role::kOperator;
  // Sums have all jobs, whoever may look at them; names are left out by user.
  const std::shared_ptr<const DescribedJobs::Jobs> jobs =
      described_.All(deadline);
  return DescribeUsers(info_.config, &quotas_, ListOf(**jobs), asked);
}

}  // namespace optstate::admin
