#ifndef OPTSTATE_SERVER_ACCEPT_ENTRANCE_H_
#define OPTSTATE_SERVER_ACCEPT_ENTRANCE_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"
#include "server/accept/handshake.h"
#include "server/accept/peer_credentials.h"
#include "server/accept/tls/tls_gate.h"
#include "server/access/live_access.h"
#include "server/os/event_loop.h"

namespace optstate::accept {

// The way of a connection from the acceptor to those who serve it: over TCP
// through TLS, where there is TLS; then through its first bytes, which say what
// it wants; and a session by its token, unless its peer is known by then.
//
// Threads: the loop's, but for Flush(), which is thread-safe. The loop outlives
// the object. The callbacks may not destroy the object.
class Entrance {
 public:
  struct Callbacks {
    // Takes the connection of a session, whose peer is known. The Hello is
    // unchecked and has no token any more.
    std::function<void(UniqueFd, const PeerCredentials&, v1::Hello)> on_session;
    // Takes a connection that speaks gRPC. A peer over TLS without a
    // certificate is nobody: each call shows a token.
    std::function<void(UniqueFd, const PeerCredentials&)> on_grpc;
    // Takes one that speaks gRPC and has to be refused with that.
    std::function<void(UniqueFd, const absl::Status&)> on_grpc_refused;
  };

  // `access` outlives the object; null: there is no TLS.
  static absl::StatusOr<std::unique_ptr<Entrance>> Open(
      os::EventLoop* loop, const v1::DaemonConfig& config,
      access::LiveAccess* access, Callbacks callbacks);
  Entrance(const Entrance&) = delete;
  Entrance& operator=(const Entrance&) = delete;

  // Takes a connection, which is non-blocking.
  void OnConnection(UniqueFd fd, PeerCredentials peer);

  // Returns when the bytes written to TLS connections so far have been passed
  // on, as far as the peers take them, or at the deadline.
  void Flush(absl::Time deadline);

 private:
  Entrance(os::EventLoop* loop, const v1::DaemonConfig& config,
           access::LiveAccess* access, Callbacks callbacks);

  // Takes a connection from the gate of TLS, on that gate's thread.
  void OnTlsConnection(UniqueFd fd, const PeerCredentials& peer,
                       const absl::Status& verdict);
  void OnHello(UniqueFd fd, PeerCredentials peer, v1::Hello hello);

  os::EventLoop* const loop_;
  const bool insecure_tcp_;
  access::LiveAccess* const access_;
  const Callbacks callbacks_;
  Handshakes handshakes_;
  std::unique_ptr<TlsGate> tls_gate_;  // null: no TLS
};

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_ENTRANCE_H_
