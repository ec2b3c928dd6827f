#ifndef OPTSTATE_CLIENT_CHANNEL_GRPC_GRPC_STREAM_H_
#define OPTSTATE_CLIENT_CHANNEL_GRPC_GRPC_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/session_types.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// One Session.Run call over a connection whose handshake is complete. The
// calling thread does all the work of the stream within Write and Read.
//
// A call that fails ends the stream; the destructor cancels an unfinished
// stream. TransportError: the connection ended. DEADLINE_EXCEEDED: nothing
// moved until the deadline. Any other error is the status with which the engine
// ended the stream.
//
// Threads: one at a time.
class GrpcStream {
 public:
  static absl::StatusOr<std::unique_ptr<GrpcStream>> Open(
      UniqueFd socket, absl::Time deadline, const InterruptCheck& interrupted);
  virtual ~GrpcStream() = default;

  // Closes a forked child's copy of the socket, so that the connection ends
  // with the parent; is the last call. The object is then leaked, because
  // gRPC's threads, which would end it, exist only in the parent.
  virtual void Abandon() = 0;

  // Hands one message to gRPC; the caller may reuse `request` when this
  // returns. Waits until the previous message has left, which is when the
  // engine's window has room.
  virtual absl::Status Write(const v1::SessionRequest& request,
                             absl::Time deadline) = 0;
  // Writes a GradientChunk whose data is sent in place, without a copy. `owner`
  // keeps the data alive for as long as gRPC may read it; bytes written into it
  // before the request is answered may or may not be sent.
  virtual absl::Status WriteChunk(uint64_t request_id, uint64_t offset_bytes,
                                  absl::Span<const std::byte> data,
                                  std::shared_ptr<const void> owner,
                                  absl::Time deadline) = 0;
  // Reads the next reply. CANCELLED: interrupted; only this error leaves the
  // stream usable.
  virtual absl::StatusOr<v1::SessionReply> Read(
      absl::Time deadline, const InterruptCheck& interrupted) = 0;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_GRPC_GRPC_STREAM_H_
