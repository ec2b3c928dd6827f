#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_TRANSPORT_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_TRANSPORT_H_

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/peer.h"
#include "server/transport/session_table.h"

namespace optstate::transport {

// Serves sessions over gRPC: a server without ports of its own, to which
// connections are handed. One thread reads a stream's requests and one writes
// its replies, so that one stream cannot hold up another; HTTP/2's flow control
// holds back a rank that sends faster than its gradients are staged.
//
// Threads: thread-safe. Destruction shuts down.
class GrpcTransport {
 public:
  struct Options {
    session::Job* job = nullptr;
    SessionTable* table = nullptr;
    FdWatcher* watcher = nullptr;
    // Time for a connection to start its stream, and for a stream to attach.
    absl::Duration handshake_timeout = absl::Seconds(5);
    // Called after each session has ended and detached; from its thread.
    std::function<void()> on_session_end = nullptr;
  };

  // Everything in `options` outlives the transport.
  static absl::StatusOr<std::unique_ptr<GrpcTransport>> Start(Options options);
  virtual ~GrpcTransport() = default;

  // Serves a connection whose HelloReply was sent.
  virtual void Serve(UniqueFd socket, Peer peer) = 0;

  // Sets the time in which streams that start later must attach.
  virtual void SetHandshakeTimeout(absl::Duration timeout) = 0;

  // Number of streams that have not ended.
  virtual size_t session_count() const = 0;

  // Ends all streams with UNAVAILABLE and refuses new ones. Waits for steps
  // that are being applied.
  virtual void Shutdown() = 0;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_TRANSPORT_H_
