#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_STREAM_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_STREAM_H_

#include <grpcpp/impl/codegen/proto_utils.h>  // protobuf messages
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/sync_stream.h>

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/grpc/grpc_session.h"
#include "server/transport/grpc/message_patience.h"
#include "server/transport/grpc/reply_queue.h"
#include "server/transport/peer.h"
#include "server/transport/session_table.h"

namespace optstate::transport {

// Requests come as bytes, so that garbage can be distinguished from the
// stream's end.
using GrpcStream = grpc::ServerReaderWriter<v1::SessionReply, grpc::ByteBuffer>;

// Moves one stream's messages between gRPC and its GrpcSession, and ends it
// when its peer is gone, or is too slow with the next request before it has
// attached (see MessagePatience).
//
// Threads: Serve() on the stream's thread; it starts one more, for replies. The
// watcher's thread looks at the timer.
class GrpcStreamServer {
 public:
  struct Environment {
    session::Job* job = nullptr;
    SessionTable* table = nullptr;
    FdWatcher* watcher = nullptr;
    // Limit of time without progress, before the rank has attached.
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
  // Starts (`awaited`) or stops timing the peer's next message.
  absl::Status AwaitPeer(bool awaited);
  // Handles the timer; returns whether the watch goes on, else cancels the
  // call.
  bool OnAttachTimer();
  // Sets the timer; zero stops it.
  absl::Status SetAttachTimer(absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(timer_mutex_);
  absl::Status ReadRequests();
  absl::Status Take(grpc::ByteBuffer* message);
  static absl::StatusOr<bool> IsLarge(grpc::ByteBuffer* message);
  absl::Status ParseAndHandle(grpc::ByteBuffer* message, size_t bytes);
  // Copies a gradient chunk from gRPC's memory to the staging area; false: it
  // is another message.
  absl::StatusOr<bool> StageChunk(grpc::ByteBuffer* message);
  void WriteReplies();
  void LogEnd(const absl::Status& end) const;

  const Environment environment_;
  const int fd_;
  grpc::ServerContext* const context_;
  GrpcStream* const stream_;
  const PeerLink link_;
  ReplyQueue replies_;
  GrpcSession session_;
  v1::SessionRequest request_;

  UniqueFd attach_timer_;
  absl::Mutex timer_mutex_;
  bool awaits_peer_ ABSL_GUARDED_BY(timer_mutex_) = false;
  MessagePatience patience_ ABSL_GUARDED_BY(timer_mutex_);
  std::optional<FdWatcher::Id> timer_watch_;
  std::optional<FdWatcher::Id> process_watch_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_STREAM_H_
