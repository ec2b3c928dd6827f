#ifndef OPTSTATE_SERVER_ADMIN_ADMIN_SERVER_H_
#define OPTSTATE_SERVER_ADMIN_ADMIN_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/admin/admin_calls.h"
#include "server/admin/admin_service.h"
#include "server/admin/call_timer.h"
#include "server/admin/connection_uids.h"

namespace optstate::admin {

// The gRPC servers of the supervisor: Admin, the standard health service and
// reflection. They listen nowhere; connections are given to them. Each caller
// has threads of its own, so that no caller can use up another's.
//
// Threads: thread-safe. Calls run on gRPC's threads.
class AdminServer {
 public:
  struct Limits {
    size_t connections_of_user = 64;  // limits.user_grpc_connections_max
    CallTimer::Limits calls = {};
  };
  // `service` outlives the server. `tokens` finds who shows a token instead of
  // a certificate; null: nobody has one.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(
      AdminService* service, const Limits& limits, TokenCheck tokens = nullptr);
  virtual ~AdminServer() = default;

  // Serves gRPC on a connection whose first bytes are HTTP/2's preface; its
  // calls are made by `caller`, whom limits count as `name` ("uid 1000").
  // RESOURCE_EXHAUSTED, naming the limit, when the caller has too many
  // connections; this connection's first call is answered with that error.
  virtual absl::Status Serve(UniqueFd connection, const Caller& caller,
                             const std::string& name) = 0;

  // Answers such a connection's first call with `why`, and closes it.
  virtual void Refuse(UniqueFd connection, const absl::Status& why) = 0;

  // Answers health checks with NOT_SERVING from now on.
  virtual void SetUnhealthy() = 0;

  // Ends the running calls, at the deadline by cancelling them, and returns
  // when none is left.
  virtual void Shutdown(absl::Time deadline) = 0;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_ADMIN_SERVER_H_
