#ifndef OPTSTATE_SERVER_ADMIN_GRPC_GATE_H_
#define OPTSTATE_SERVER_ADMIN_GRPC_GATE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate::admin {

// Stands between gRPC's peers and gRPC 1.51, which reads a header of any size
// into memory, in time that grows with its square, on a thread that also serves
// other connections. Bytes pass through a socket pair; of each frame the gate
// reads the header. A connection whose metadata is too large is refused with
// the reason and closed before gRPC sees it. All connections of a peer may
// together send kUnitsPerSecond after kBurst; the excess waits in its socket. A
// unit is a frame, or a KiB.
//
// Threads: thread-safe. All work is done on a thread of its own, which never
// blocks on a peer.
class GrpcGate {
 public:
  static constexpr double kBurst = 1000;
  static constexpr double kUnitsPerSecond = 200;

  static absl::StatusOr<std::unique_ptr<GrpcGate>> Start();
  // Closes all connections.
  virtual ~GrpcGate() = default;

  // Takes a connection whose first bytes are HTTP/2's preface, and returns the
  // end for gRPC. `peer` is the name that limits count; empty: no limits apply.
  virtual absl::StatusOr<UniqueFd> Guard(UniqueFd connection,
                                         std::string peer) = 0;

  // Answers the connection's first call with `why`, in gRPC, and closes it.
  virtual void Refuse(UniqueFd connection, absl::Status why) = 0;

  // Returns when the bytes that gRPC has written so far have been passed on, as
  // far as the peers take them, or at the deadline.
  virtual void Flush(absl::Time deadline) = 0;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_GRPC_GATE_H_
