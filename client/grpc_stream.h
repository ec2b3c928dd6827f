#ifndef OPTSTATE_CLIENT_GRPC_STREAM_H_
#define OPTSTATE_CLIENT_GRPC_STREAM_H_

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

// One Session.Run call over a connection that was greeted already. All of its
// work is done by the calling thread within Write and Read.
//
// A call that fails ends the stream; destroying it cancels what is left.
// TransportError: the connection ended. DEADLINE_EXCEEDED: nothing moved until
// the deadline. Anything else is what the engine ended the stream with.
//
// Threads: one at a time.
class GrpcStream {
 public:
  static absl::StatusOr<std::unique_ptr<GrpcStream>> Open(
      UniqueFd socket, absl::Time deadline, const InterruptCheck& interrupted);
  virtual ~GrpcStream() = default;

  // In a forked child, as the last call: closes its copy of the socket, so that
  // the connection ends with the parent. The object is to be leaked then, for
  // gRPC's threads, which would end it, exist only there.
  virtual void Abandon() = 0;

  // Hands one message to gRPC; `request` is free when it returns. Waits for the
  // message before it to leave, which is when the engine's window has room.
  virtual absl::Status Write(const v1::SessionRequest& request,
                             absl::Time deadline) = 0;
  // The same for a GradientChunk, whose data is sent from where it is, without
  // a copy. `owner` keeps it there for as long as gRPC may look at it; what is
  // written into it before the request is answered may or may not be sent.
  virtual absl::Status WriteChunk(uint64_t request_id, uint64_t offset_bytes,
                                  absl::Span<const std::byte> data,
                                  std::shared_ptr<const void> owner,
                                  absl::Time deadline) = 0;
  // CANCELLED: interrupted; this alone leaves the stream as it is.
  virtual absl::StatusOr<v1::SessionReply> Read(
      absl::Time deadline, const InterruptCheck& interrupted) = 0;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_GRPC_STREAM_H_
