#include "server/transport/grpc/grpc_transport.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_posix.h>
#include <grpcpp/support/method_handler.h>

#include <atomic>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/shm/frame.h"
#include "proto/types/grpc_status.h"
#include "server/transport/grpc/grpc_stream.h"
#include "spdlog/spdlog.h"

namespace optstate::transport {
namespace {

// A dead TCP peer is noticed after time + timeout, long enough for a trainer
// that is stopped for a minute, in a debugger or by a scheduler.
constexpr int kKeepaliveTimeMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 90'000;
// The least interval of peers' pings.
constexpr int kPeerPingIntervalMs = 5'000;
// The flow-control window of a stream: some chunks arrive while one is staged.
constexpr int kStreamWindowBytes = 4 << 20;
// A chunk fits one frame, instead of one for each 16 KiB of it.
constexpr int kFrameBytes = shm::kChunkBytesMax;

struct Connection {
  int fd = -1;
  Peer peer;
};

// optstate.v1.Session with its requests left as bytes: the generated service
// cannot tell a request that does not parse from the end of the stream.
class SessionService : public grpc::Service {
 public:
  using Run = std::function<grpc::Status(grpc::ServerContext*, GrpcStream*)>;

  explicit SessionService(Run run) : run_(std::move(run)) {
    AddMethod(new grpc::internal::RpcServiceMethod(
        "/optstate.v1.Session/Run", grpc::internal::RpcMethod::BIDI_STREAMING,
        new grpc::internal::BidiStreamingHandler<
            SessionService, grpc::ByteBuffer, v1::SessionReply>(
            [](SessionService* service, grpc::ServerContext* context,
               GrpcStream* stream) { return service->run_(context, stream); },
            this)));
  }

 private:
  const Run run_;
};

class GrpcTransportImpl : public GrpcTransport {
 public:
  explicit GrpcTransportImpl(Options options)
      : options_(std::move(options)),
        handshake_timeout_(options_.handshake_timeout),
        service_([this](grpc::ServerContext* context, GrpcStream* stream) {
          return Run(context, stream);
        }) {}
  ~GrpcTransportImpl() override { Shutdown(); }

  absl::Status StartServer();
  void Serve(UniqueFd socket, Peer peer) override;
  void SetHandshakeTimeout(absl::Duration timeout) override {
    absl::MutexLock lock(&mutex_);
    handshake_timeout_ = timeout;
  }
  size_t session_count() const override { return session_count_.load(); }
  void Shutdown() override;

 private:
  grpc::Status Run(grpc::ServerContext* context, GrpcStream* stream);

  const Options options_;
  absl::Mutex mutex_;
  absl::Duration handshake_timeout_ ABSL_GUARDED_BY(mutex_);
  SessionService service_;
  std::unique_ptr<grpc::Server> server_;
  std::atomic<size_t> session_count_{0};
  // Connections by gRPC's name of them, "fd:N". The number stays taken as long
  // as a call on the connection lives, so a call never finds another's entry; a
  // later connection with the same number replaces it.
  absl::flat_hash_map<std::string, Connection> connections_
      ABSL_GUARDED_BY(mutex_);
};

absl::Status GrpcTransportImpl::StartServer() {
  grpc::ServerBuilder builder;
  builder.RegisterService(&service_);
  builder.SetMaxReceiveMessageSize(static_cast<int>(shm::kMessageBytesMax));
  builder.SetMaxSendMessageSize(static_cast<int>(shm::kMessageBytesMax));
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  // A small compressed message may hold gigabytes.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 1);
  builder.AddChannelArgument(
      GRPC_ARG_MAX_CONNECTION_IDLE_MS,
      static_cast<int>(absl::ToInt64Milliseconds(options_.handshake_timeout)));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
      kPeerPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES,
                             kStreamWindowBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::InternalError("the gRPC server for sessions did not start");
  }
  return absl::OkStatus();
}

void GrpcTransportImpl::Serve(UniqueFd socket, Peer peer) {
  const int flags = ::fcntl(socket.get(), F_GETFL);
  ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK);
  const int fd = socket.release();
  {
    absl::MutexLock lock(&mutex_);
    connections_.insert_or_assign(absl::StrCat("fd:", fd),
                                  Connection{fd, std::move(peer)});
  }
  grpc::AddInsecureChannelFromFd(server_.get(), fd);
}

grpc::Status GrpcTransportImpl::Run(grpc::ServerContext* context,
                                    GrpcStream* stream) {
  Connection connection;
  absl::Duration attach_timeout;
  {
    absl::MutexLock lock(&mutex_);
    attach_timeout = handshake_timeout_;
    const auto entry = connections_.find(context->peer());
    if (entry == connections_.end()) {
      return ToGrpc(absl::InternalError(
          absl::StrCat("a stream on ", context->peer(),
                       ", a connection that was not handed over")));
    }
    connection = entry->second;
  }
  session_count_.fetch_add(1);
  absl::Status end;
  {
    GrpcStreamServer server({.job = options_.job,
                             .table = options_.table,
                             .watcher = options_.watcher,
                             .attach_timeout = attach_timeout},
                            connection.fd, std::move(connection.peer), context,
                            stream);
    end = server.Serve();
  }
  session_count_.fetch_sub(1);
  if (options_.on_session_end) options_.on_session_end();
  return ToGrpc(end);
}

void GrpcTransportImpl::Shutdown() {
  if (server_ == nullptr) return;
  // The deadline is now: a stream has no natural end to wait for. Handlers
  // detach first.
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcTransport>> GrpcTransport::Start(
    Options options) {
  auto transport = std::make_unique<GrpcTransportImpl>(std::move(options));
  const absl::Status started = transport->StartServer();
  if (!started.ok()) return started;
  return transport;
}

}  // namespace optstate::transport
