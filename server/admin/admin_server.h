#ifndef OPTSTATE_SERVER_ADMIN_ADMIN_SERVER_H_
#define OPTSTATE_SERVER_ADMIN_ADMIN_SERVER_H_

#include <sys/types.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/admin/admin_service.h"
#include "server/admin/connection_uids.h"

namespace optstate::admin {

// The gRPC server of the supervisor: Admin, the standard health service and
// reflection. It listens nowhere; connections are given to it.
//
// Threads: thread-safe. Calls run on a few threads of gRPC's.
class AdminServer {
 public:
  // `service` outlives the server.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(
      AdminService* service);
  virtual ~AdminServer() = default;

  // Serves gRPC on a connection whose first bytes are HTTP/2's preface; what it
  // asks is asked by `caller`. RESOURCE_EXHAUSTED when that has too many.
  virtual absl::Status Serve(UniqueFd connection, const Caller& caller) = 0;

  // Says NOT_SERVING to health checks from now on.
  virtual void SetUnhealthy() = 0;

  // Ends the calls that run, at the deadline by cancelling them, and returns
  // when none is left.
  virtual void Shutdown(absl::Time deadline) = 0;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_ADMIN_SERVER_H_
