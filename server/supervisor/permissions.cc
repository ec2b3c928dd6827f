#include "server/supervisor/permissions.h"

#include "absl/strings/str_cat.h"

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

}  // namespace

absl::Status CheckMayTrain(const Caller& caller) {
  if (caller.role >= Role::kTrainer) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      "making jobs, attaching to them and changing them takes the role "
      "trainer, and ",
      caller.name(), " has the role ", access::RoleName(caller.role)));
}

absl::Status CheckMayJoinJob(absl::string_view job, uid_t owner,
                             const Caller& caller) {
  const absl::Status trains = CheckMayTrain(caller);
  if (!trains.ok()) return trains;
  const bool is_root = caller.uid == 0 && caller.role == Role::kOperator;
  if (caller.uid == owner || is_root) return absl::OkStatus();
  return BelongsToAnother(job, owner, caller,
                          "choose another job name, or act as its owner");
}

absl::Status CheckMayChangeJob(absl::string_view job, uid_t owner,
                               const Caller& caller) {
  const absl::Status trains = CheckMayTrain(caller);
  if (!trains.ok()) return trains;
  if (caller.uid == owner || caller.role == Role::kOperator) {
    return absl::OkStatus();
  }
  return BelongsToAnother(job, owner, caller,
                          "only its owner and operators (root, the daemon's "
                          "user) may delete or recover it");
}

absl::Status CheckOperator(const Caller& caller) {
  if (caller.role == Role::kOperator) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      "this concerns every job: it takes an operator (root, the daemon's user, "
      "access.operator_groups, an identity with that role), and ",
      caller.name(), " has the role ", access::RoleName(caller.role)));
}

}  // namespace optstate::supervisor
