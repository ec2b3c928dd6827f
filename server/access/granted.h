#ifndef OPTSTATE_SERVER_ACCESS_GRANTED_H_
#define OPTSTATE_SERVER_ACCESS_GRANTED_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "server/access/caller.h"

namespace optstate::access {

// The user and the role that an identity or a token gives.
struct Granted {
  uid_t uid = Caller::kNobody;
  Role role = Role::kNone;
};

// INVALID_ARGUMENT: no user or no role is named; NOT_FOUND: no such user.
absl::StatusOr<Granted> GrantedTo(const std::string& user, v1::Role role);

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_GRANTED_H_
