#include "server/supervisor/permissions.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "proto/types/access_names.h"
#include "proto/types/status_macros.h"
#include "server/access/memberships.h"

namespace optstate::supervisor {

using access::Caller;
using access::Role;

namespace {

absl::Status BelongsToAnother(absl::string_view job, uid_t owner,
                              const Caller& caller, absl::string_view advice) {
  return absl::PermissionDeniedError(absl::StrCat(
      "job \"", job, "\" belongs to uid ", owner,
      " and the request comes from ", caller.name(), ": ", advice));
}

bool IsInGroup(const v1::JobAccess& access, const Caller& caller) {
  return !access.group().empty() &&
         access::MachineMemberships().IsIn(caller.uid, access.group());
}

bool IsReader(const v1::JobAccess& access, const Caller& caller) {
  access::Memberships& machine = access::MachineMemberships();
  for (const std::string& reader : access.readers()) {
    const absl::string_view group = ReaderGroup(reader);
    if (group.empty() ? machine.IsUser(caller.uid, reader)
                      : machine.IsIn(caller.uid, std::string(group))) {
      return true;
    }
  }
  return false;
}

}  // namespace

absl::Status NoJob(absl::string_view job) {
  return absl::NotFoundError(
      absl::StrCat("there is no job \"", job, "\" on this node"));
}

absl::Status CheckMayTrain(const Caller& caller) {
  if (caller.role >= Role::kTrainer) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("making jobs, attaching to them and changing them ",
                   access::MissingRole(Role::kTrainer, caller)));
}

bool MayLook(uid_t owner, const v1::JobAccess& access, const Caller& caller) {
  if (caller.role < Role::kViewer) return false;
  if (!access.is_private() || caller.uid == owner ||
      caller.role == Role::kOperator) {
    return true;
  }
  return IsInGroup(access, caller) || IsReader(access, caller);
}

absl::Status CheckMayLook(absl::string_view job, uid_t owner,
                          const v1::JobAccess& access, const Caller& caller) {
  return MayLook(owner, access, caller) ? absl::OkStatus() : NoJob(job);
}

absl::Status CheckMayJoinJob(absl::string_view job, uid_t owner,
                             const v1::JobAccess& access,
                             const Caller& caller) {
  OPTSTATE_RETURN_IF_ERROR(CheckMayTrain(caller));
  const bool is_root = caller.uid == 0 && caller.role == Role::kOperator;
  if (caller.uid == owner || is_root || IsInGroup(access, caller)) {
    return absl::OkStatus();
  }
  if (!MayLook(owner, access, caller)) {
    return absl::PermissionDeniedError(
        absl::StrCat("the job name \"", job,
                     "\" is taken on this node: choose another job name"));
  }
  return BelongsToAnother(job, owner, caller,
                          "choose another job name, act as its owner, or have "
                          "its owner name a group that you are in (optctl set "
                          "job NAME group=)");
}

absl::Status CheckMayChangeJob(absl::string_view job, uid_t owner,
                               const v1::JobAccess& access,
                               const Caller& caller) {
  OPTSTATE_RETURN_IF_ERROR(CheckMayTrain(caller));
  if (caller.uid == owner || caller.role == Role::kOperator ||
      IsInGroup(access, caller)) {
    return absl::OkStatus();
  }
  OPTSTATE_RETURN_IF_ERROR(CheckMayLook(job, owner, access, caller));
  return BelongsToAnother(job, owner, caller,
                          "only its owner, members of its group and operators "
                          "(root, the daemon's user) may change, delete or "
                          "recover it");
}

absl::Status CheckMayChangeAccess(absl::string_view job, uid_t owner,
                                  const v1::JobAccess& access,
                                  const Caller& caller) {
  OPTSTATE_RETURN_IF_ERROR(CheckMayChangeJob(job, owner, access, caller));
  if (caller.uid == owner || caller.role == Role::kOperator) {
    return absl::OkStatus();
  }
  return BelongsToAnother(job, owner, caller,
                          "its group may do all but say who may use it, which "
                          "only its owner and operators (root, the daemon's "
                          "user) may");
}

absl::Status CheckOperator(const Caller& caller) {
  if (caller.role == Role::kOperator) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      "this concerns every job: it takes an operator (root, the daemon's user, "
      "access.operator_groups, an identity with that role), and ",
      caller.name(), " has the role ", access::RoleName(caller.role)));
}

}  // namespace optstate::supervisor
