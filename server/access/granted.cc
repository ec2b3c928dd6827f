#include "server/access/granted.h"

#include "proto/types/status_macros.h"
#include "server/access/unix_names.h"

namespace optstate::access {
namespace {

Role RoleOf(v1::Role role) {
  switch (role) {
    case v1::ROLE_VIEWER:
      return Role::kViewer;
    case v1::ROLE_TRAINER:
      return Role::kTrainer;
    case v1::ROLE_OPERATOR:
      return Role::kOperator;
    default:
      return Role::kNone;
  }
}

}  // namespace

absl::StatusOr<Granted> GrantedTo(const std::string& user, v1::Role role) {
  Granted granted;
  granted.role = RoleOf(role);
  if (granted.role == Role::kNone) {
    return absl::InvalidArgumentError(
        "has no role: viewer, trainer or operator");
  }
  if (user.empty()) {
    return absl::InvalidArgumentError(
        "has no user: the name or number of one of this machine");
  }
  OPTSTATE_ASSIGN_OR_RETURN(granted.uid, FindUser(user));
  return granted;
}

}  // namespace optstate::access
