#ifndef OPTSTATE_SERVER_ACCEPT_TLS_TLS_GATE_H_
#define OPTSTATE_SERVER_ACCEPT_TLS_TLS_GATE_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/accept/peer_credentials.h"
#include "server/access/live_access.h"

namespace optstate::accept {

// Ends TLS for the rest of the daemon: takes the connections of TCP peers, and
// gives back, for each that has shown who it is, the end of a socket pair where
// its bytes are plain. Engines and gRPC know nothing of TLS, and a connection
// lasts no longer than this object.
//
// Peers in their handshake are bounded as those of Handshakes: kPendingMax
// together, half of them from one machine. The files of `access` are looked at
// each second, and connections of clients that they would not accept now, or
// would take for somebody else, are closed; all are, when the CAs of clients
// or the tokens have changed.
//
// Threads: thread-safe. All work is done on a thread of its own, which never
// blocks on a peer.
class TlsGate {
 public:
  static constexpr size_t kPendingMax = 512;

  // Takes a connection, its peer, and a verdict: unless that is OK the peer is
  // to be told so, in its own protocol, and to be refused. Called on the gate's
  // thread.
  using Callback = std::function<void(UniqueFd, const PeerCredentials&,
                                      const absl::Status&)>;

  // `access` outlives the gate.
  static absl::StatusOr<std::unique_ptr<TlsGate>> Start(
      access::LiveAccess* access, absl::Duration handshake_timeout,
      Callback on_connection);
  // Closes all connections.
  virtual ~TlsGate() = default;

  // Takes a TCP connection, which is non-blocking.
  virtual void Accept(UniqueFd connection, PeerCredentials peer) = 0;

  // Returns when the bytes written inside so far have been passed on, as far as
  // the peers take them, or at the deadline.
  virtual void Flush(absl::Time deadline) = 0;
};

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_TLS_TLS_GATE_H_
