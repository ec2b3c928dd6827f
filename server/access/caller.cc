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

Caller UnixCaller(uid_t uid, bool in_operator_group) {
  const bool is_operator = uid == 0 || uid == ::geteuid() || in_operator_group;
  return {.uid = uid,
          .role = is_operator ? Role::kOperator : Role::kTrainer,
          .via = Via::kUnix};
}

Caller InsecureTcpCaller() {
  return {
      .uid = ::geteuid(), .role = Role::kOperator, .via = Via::kInsecureTcp};
}

}  // namespace optstate::access
