#ifndef OPTSTATE_SERVER_ACCESS_CALLER_H_
#define OPTSTATE_SERVER_ACCESS_CALLER_H_

#include <sys/types.h>

#include <compare>
#include <string>

#include "absl/strings/string_view.h"

namespace optstate::access {

// The rights of a caller; each role may what those before it may.
enum class Role { kNone, kViewer, kTrainer, kOperator };
absl::string_view RoleName(Role role);

// The way by which a caller came.
enum class Via {
  kUnix,         // the kernel names the user
  kTls,          // a certificate or a token names an identity
  kInsecureTcp,  // nothing does
};

// The one who makes a call or opens a session. By default nobody, who may do
// nothing.
struct Caller {
  static constexpr uid_t kNobody = 65534;

  uid_t uid = kNobody;  // whose jobs the caller's are
  Role role = Role::kNone;
  Via via = Via::kUnix;
  // The name in the certificate, or of the token; empty: the uid says it all.
  std::string identity = "";

  // Returns whether the caller is known to be an operator. Part of what others
  // can use up is reserved for those.
  bool is_operator() const {
    return role == Role::kOperator && via != Via::kInsecureTcp;
  }
  bool is_local() const { return via == Via::kUnix; }
  // The name for log lines and limits, e.g. "uid 1000" or
  // "URI:spiffe://cluster/trainer (uid 1000)".
  std::string name() const;

  friend auto operator<=>(const Caller&, const Caller&) = default;
};

// A user at a unix socket: root and the daemon's own user are operators, others
// have the role that their groups give them (unix_roles.h).
Caller UnixCaller(uid_t uid, Role of_groups = Role::kTrainer);

// A peer over TCP without TLS. It acts as the daemon's own user.
Caller InsecureTcpCaller();

// Returns the end of an error text for a caller whose role is too low: "takes
// the role trainer, and uid 1000 has the role viewer", and for a user at a unix
// socket how it comes to the role.
std::string MissingRole(Role role, const Caller& caller);

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_CALLER_H_
