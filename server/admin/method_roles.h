#ifndef OPTSTATE_SERVER_ADMIN_METHOD_ROLES_H_
#define OPTSTATE_SERVER_ADMIN_METHOD_ROLES_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/access/caller.h"

namespace optstate::admin {

// The right to call one method of Admin.
struct MethodRole {
  absl::string_view method;
  access::Role role;  // the least that may call it
  // Peers over TCP without TLS, who act as the daemon's user, may call it too.
  bool over_insecure_tcp = true;
};

// All methods of Admin. A method that is not here is refused to everyone. What
// a call does to a job is checked besides (supervisor/permissions.h), and so is
// what single fields of a request ask for.
inline constexpr MethodRole kMethodRoles[] = {
    {"GetStatus", access::Role::kViewer},
    {"ListJobs", access::Role::kViewer},
    {"GetJob", access::Role::kViewer},
    {"ListSessions", access::Role::kViewer},
    {"ListParameters", access::Role::kViewer},
    {"DescribeTiers", access::Role::kViewer},  // to measure: operator
    {"DescribeDevices", access::Role::kViewer},
    {"WatchEvents", access::Role::kViewer},
    {"ListUsers", access::Role::kViewer},  // of others: operator
    {"DeleteJob", access::Role::kTrainer},
    {"DeleteJobWatched", access::Role::kTrainer},
    {"RecoverJob", access::Role::kTrainer},
    {"SetJob", access::Role::kTrainer},
    {"VerifyJob", access::Role::kTrainer},
    {"TraceJob", access::Role::kTrainer},
    {"SleepJob", access::Role::kTrainer},
    {"WakeJob", access::Role::kTrainer},
    {"Drain", access::Role::kOperator},
    // Nobody in particular must not choose the program that runs as the
    // daemon's user.
    {"Upgrade", access::Role::kOperator, /*over_insecure_tcp=*/false},
};

// Returns PERMISSION_DENIED unless `caller` may call the method; the text says
// which role that takes, which the caller has, and how a user at a unix socket
// comes to it. UNAUTHENTICATED: the caller has not said who it is.
absl::Status CheckMethod(absl::string_view method,
                         const access::Caller& caller);

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_METHOD_ROLES_H_
