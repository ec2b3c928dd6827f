#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_STREAM_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_STREAM_H_

#include <grpcpp/impl/codegen/proto_utils.h>  // messages of protobuf
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/sync_stream.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/grpc_session.h"
#include "server/transport/peer.h"
#include "server/transport/reply_queue.h"
#include "server/transport/session_table.h"

namespace optstate {

// Requests come as bytes, so that garbage can be told from the stream's end.
using GrpcStream = grpc::ServerReaderWriter<v1::SessionReply, grpc::ByteBuffer>;

// Moves one stream's messages between gRPC and its GrpcSession, and ends it
// when its peer is gone, or is too slow with the next request before it has
// attached.
//
// Threads: Serve() on the stream's thread; it starts one more, for replies.
class GrpcStreamServer {
 public:
  struct Environment {
    Job* job = nullptr;
    SessionTable* table = nullptr;
    FdWatcher* watcher = nullptr;
    absl::Duration attach_timeout = absl::Seconds(5);
  };

  // `fd` is the connection's, which gRPC keeps open during the call.
  GrpcStreamServer(const Environment& environment, int fd, Peer peer,
                   grpc::ServerContext* context, GrpcStream* stream);

  // Serves the session until it ends; it is detached when this returns. OK when
  // the peer ended it.
  absl::Status Serve();

 private:
  absl::Status WatchPeer();
  // Zero: stops it.
  absl::Status SetAttachTimer(absl::Duration timeout);
  absl::Status ReadRequests();
  absl::Status Take(grpc::ByteBuffer* message);
  static absl::StatusOr<bool> IsLarge(grpc::ByteBuffer* message);
  absl::Status ParseAndHandle(grpc::ByteBuffer* message, size_t bytes);
  // Copies a gradient chunk from gRPC's memory to where it is staged; false: it
  // is another message.
  absl::StatusOr<bool> StageChunk(grpc::ByteBuffer* message);
  void WriteReplies();
  void LogEnd(const absl::Status& end) const;

  const Environment environment_;
  grpc::ServerContext* const context_;
  GrpcStream* const stream_;
  const PeerLink link_;
  ReplyQueue replies_;
  GrpcSession session_;
  v1::SessionRequest request_;

  UniqueFd attach_timer_;
  std::optional<FdWatcher::Id> timer_watch_;
  std::optional<FdWatcher::Id> process_watch_;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_STREAM_H_
