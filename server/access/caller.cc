#include "server/access/caller.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace optstate::access {

absl::string_view RoleName(Role role) {
  switch (role) {
    case Role::kNone:
      break;
    case Role::kViewer:
      return "viewer";
    case Role::kTrainer:
      return "trainer";
    case Role::kOperator:
      return "operator";
  }
  return "none";
}

std::string Caller::name() const {
  if (identity.empty()) return absl::StrCat("uid ", uid);
  return absl::StrCat(identity, " (uid ", uid, ")");
}

Caller UnixCaller(uid_t uid, Role of_groups) {
  const bool is_operator = uid == 0 || uid == ::geteuid();
  return {.uid = uid,
          .role = is_operator ? Role::kOperator : of_groups,
          .via = Via::kUnix};
}

Caller InsecureTcpCaller() {
  return {
      .uid = ::geteuid(), .role = Role::kOperator, .via = Via::kInsecureTcp};
}

std::string MissingRole(Role role, const Caller& caller) {
  std::string text =
      absl::StrCat("takes the role ", RoleName(role), ", and ", caller.name(),
                   " has the role ", RoleName(caller.role));
  if (!caller.is_local()) return text;
  if (role == Role::kOperator) {
    return absl::StrCat(text,
                        ": act as root, as the daemon's user or as a member of "
                        "access.operator_groups");
  }
  return absl::StrCat(
      text, ": when it connected, its process was in no group of ",
      role == Role::kViewer ? "access.viewer_groups or " : "",
      "access.trainer_groups; the daemon's operator adds the user to one, who "
      "then logs in anew, or names one of the user's groups there");
}

}  // namespace optstate::access
