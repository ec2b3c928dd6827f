#ifndef OPTSTATE_CLIENT_ADMIN_ADMIN_CONNECTION_H_
#define OPTSTATE_CLIENT_ADMIN_ADMIN_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/endpoint/endpoint.h"
#include "client/session_types.h"
#include "optstate/v1/admin.grpc.pb.h"

namespace optstate::client {

// How the user of a connection says what its errors are about.
struct AdminWords {
  std::string timeout;       // the setting's name, such as "--timeout"
  std::string name_another;  // "or name another with --endpoint"
  // "; `optctl status` says how it is", or nothing.
  std::string when_silent;
};

// A connection to the Admin service of one daemon, with the TLS and the token
// of the environment. The daemon's one unix socket serves it beside sessions.
//
// Threads: one at a time.
class AdminConnection {
 public:
  // Makes it without connecting. `timeout`: named by errors. INVALID_ARGUMENT:
  // a private daemon (embedded); the errors of CheckPathOwners().
  static absl::StatusOr<std::unique_ptr<AdminConnection>> Make(
      const Endpoint& endpoint, AdminWords words, absl::Duration timeout);

  const Endpoint& endpoint() const { return endpoint_; }
  absl::Duration timeout() const { return timeout_; }

  // Waits until a daemon answers; precedes each call, because a connection of
  // TLS is one call's. UNAVAILABLE: none answers there; PERMISSION_DENIED: this
  // user may not use the socket; DEADLINE_EXCEEDED; CANCELLED: interrupted;
  // and the errors of Dial(). They name the endpoint.
  absl::Status Await(absl::Time deadline,
                     const InterruptCheck& interrupted = nullptr);
  // The service, once Await() was OK; until the next Await().
  v1::Admin::Stub* stub() const { return stub_.get(); }
  // Adds the token to a call.
  void SayWhoCalls(grpc::ClientContext* context) const;

  // Returns the error of a call that has ended so; names the endpoint.
  // UNIMPLEMENTED: the daemon is of an older build.
  absl::Status Explain(const grpc::Status& status) const;
  // Returns the error of a call that was given up because nothing came.
  absl::Status Silent() const;

 private:
  AdminConnection(Endpoint endpoint, AdminWords words, absl::Duration timeout);

  absl::Status ConnectWithTls(absl::Time deadline,
                              const InterruptCheck& interrupted);
  absl::Status OlderDaemon() const;
  absl::Status UnreachableError(absl::Time deadline) const;
  absl::Status NobodySpoke() const;

  const Endpoint endpoint_;
  const AdminWords words_;
  const absl::Duration timeout_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Admin::Stub> stub_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ADMIN_ADMIN_CONNECTION_H_
