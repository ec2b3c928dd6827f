#include "server/admin/method_roles.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace optstate::admin {

using access::Caller;
using access::Role;
using access::Via;

absl::Status CheckMethod(absl::string_view method, const Caller& caller) {
  const auto* const row = std::find_if(
      std::begin(kMethodRoles), std::end(kMethodRoles),
      [method](const MethodRole& each) { return each.method == method; });
  if (row == std::end(kMethodRoles)) {
    return absl::PermissionDeniedError(
        absl::StrCat("no role may call ", method, ", which has no rule"));
  }
  if (caller.via == Via::kTls && caller.identity.empty()) {
    return absl::UnauthenticatedError(
        "the client has not said who it is: it shows a certificate or, where "
        "the daemon has access.tokens_file, a token (OPTSTATE_TOKEN)");
  }
  if (caller.role < row->role) {
    return absl::PermissionDeniedError(
        absl::StrCat(method, " ", access::MissingRole(row->role, caller)));
  }
  if (caller.via == Via::kInsecureTcp && !row->over_insecure_tcp) {
    return absl::PermissionDeniedError(absl::StrCat(
        method,
        " is asked for over the daemon's unix socket or over TLS, not "
        "over TCP, which names no user"));
  }
  return absl::OkStatus();
}

}  // namespace optstate::admin
