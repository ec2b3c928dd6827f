#include "server/transport/grpc/grpc_stream.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <pthread.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/transport/grpc/chunk_header.h"
#include "server/transport/request_size.h"
#include "spdlog/spdlog.h"

namespace optstate::transport {
namespace {

// Four times as many as a client keeps in flight (a ring's entries).
constexpr size_t kRepliesMax = 4096;
// Chunks of parameters are the largest replies; this is enough to keep a fast
// peer busy.
constexpr size_t kReplyBytesMax = 8 << 20;

}  // namespace

GrpcStreamServer::GrpcStreamServer(const Environment& environment, int fd,
                                   Peer peer, grpc::ServerContext* context,
                                   GrpcStream* stream)
    : environment_(environment),
      fd_(fd),
      context_(context),
      stream_(stream),
      link_(fd, peer.pid),
      replies_(kRepliesMax, kReplyBytesMax),
      session_(environment.job, environment.table, std::move(peer), &link_,
               &replies_, [context] { context->TryCancel(); }) {}

absl::Status GrpcStreamServer::Serve() {
  absl::Status end = WatchPeer();
  std::thread writer;
  // std::thread reports a lack of threads by throwing.
  try {
    writer = std::thread([this] { WriteReplies(); });
  } catch (const std::system_error& error) {
    end.Update(absl::ResourceExhaustedError(
        absl::StrCat("no thread for one more session: ", error.what())));
  }
  if (end.ok()) end = ReadRequests();
  // The order matters: first nothing can cancel the call any more, then nothing
  // answers, then all answers are written, and only then the call ends.
  if (timer_watch_) environment_.watcher->Forget(*timer_watch_);
  if (process_watch_) environment_.watcher->Forget(*process_watch_);
  LogEnd(end);
  if (!absl::IsCancelled(end)) session_.traffic().CountAnswer(end);
  session_.Detach(std::string(end.message()));
  replies_.Close();
  if (writer.joinable()) writer.join();
  return absl::IsCancelled(end) ? absl::OkStatus() : end;
}

absl::Status GrpcStreamServer::WatchPeer() {
  attach_timer_.reset(
      ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!attach_timer_.ok()) return OsError(errno, "timerfd_create");
  OPTSTATE_RETURN_IF_ERROR(AwaitPeer(true));
  OPTSTATE_ASSIGN_OR_RETURN(timer_watch_, environment_.watcher->WatchWhile(
                                              attach_timer_.get(), [this] {
                                                return OnAttachTimer();
                                              }));
  if (link_.process() < 0) return absl::OkStatus();
  // gRPC notices a closed socket by itself.
  OPTSTATE_ASSIGN_OR_RETURN(
      process_watch_, environment_.watcher->Watch(
                          link_.process(), [this] { context_->TryCancel(); }));
  return absl::OkStatus();
}

absl::Status GrpcStreamServer::AwaitPeer(bool awaited) {
  absl::MutexLock lock(&timer_mutex_);
  awaits_peer_ = awaited;
  if (!awaited) return SetAttachTimer(absl::ZeroDuration());
  patience_.Begin(absl::Now(), ArrivedOn(fd_));
  return SetAttachTimer(environment_.attach_timeout);
}

bool GrpcStreamServer::OnAttachTimer() {
  absl::MutexLock lock(&timer_mutex_);
  // A message may have come just now, and stopped the timer or set it anew.
  uint64_t expirations = 0;
  const bool has_expired = ::read(attach_timer_.get(), &expirations,
                                  sizeof(expirations)) == sizeof(expirations);
  if (!awaits_peer_ || !has_expired) return true;
  if (patience_.Lasts(absl::Now(), ArrivedOn(fd_)) &&
      SetAttachTimer(environment_.attach_timeout).ok()) {
    return true;
  }
  context_->TryCancel();
  return false;
}

absl::Status GrpcStreamServer::SetAttachTimer(absl::Duration timeout) {
  itimerspec timer = {};
  timer.it_value = absl::ToTimespec(timeout);
  if (::timerfd_settime(attach_timer_.get(), 0, &timer, nullptr) != 0) {
    return OsError(errno, "timerfd_settime");
  }
  return absl::OkStatus();
}

absl::Status GrpcStreamServer::ReadRequests() {
  grpc::ByteBuffer message;
  while (stream_->Read(&message)) {
    // The timer counts the peer's time, not this side's time for an answer.
    if (timer_watch_) {
      OPTSTATE_RETURN_IF_ERROR(AwaitPeer(false));
    }
    OPTSTATE_RETURN_IF_ERROR(Take(&message));
    if (!timer_watch_) continue;
    if (session_.attached()) {
      environment_.watcher->Forget(*timer_watch_);
      timer_watch_.reset();
    } else {
      OPTSTATE_RETURN_IF_ERROR(AwaitPeer(true));
    }
  }
  return absl::CancelledError(context_->IsCancelled()
                                  ? "connection lost or cancelled"
                                  : "stream closed by its rank");
}

// Returns whether the message is a large request; an error says why it may not
// be parsed.
absl::StatusOr<bool> GrpcStreamServer::IsLarge(grpc::ByteBuffer* message) {
  const size_t bytes = message->Length();
  if (bytes <= kSmallRequestBytes) return false;
  grpc::ProtoBufferReader slices(message);
  if (!slices.status().ok()) return absl::InternalError("gRPC's buffer");
  return AdmitRequest(&slices, bytes);
}

absl::Status GrpcStreamServer::Take(grpc::ByteBuffer* message) {
  OPTSTATE_ASSIGN_OR_RETURN(const bool staged, StageChunk(message));
  if (staged) return absl::OkStatus();
  const size_t bytes = message->Length();
  OPTSTATE_ASSIGN_OR_RETURN(const bool is_large, IsLarge(message));
  if (is_large) {
    absl::MutexLock lock(&environment_.table->large_request());
    const absl::Status handled = ParseAndHandle(message, bytes);
    // A large request would keep its memory for the next one.
    request_ = v1::SessionRequest();
    return handled;
  }
  return ParseAndHandle(message, bytes);
}

absl::Status GrpcStreamServer::ParseAndHandle(grpc::ByteBuffer* message,
                                              size_t bytes) {
  const grpc::Status parsed =
      grpc::SerializationTraits<v1::SessionRequest>::Deserialize(message,
                                                                 &request_);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", bytes, " bytes is no SessionRequest"));
  }
  return session_.Handle(request_);
}

absl::StatusOr<bool> GrpcStreamServer::StageChunk(grpc::ByteBuffer* message) {
  grpc::ProtoBufferReader slices(message);
  if (!slices.status().ok()) return false;
  google::protobuf::io::CodedInputStream input(&slices);
  const auto header = ReadChunkHeader(&input, message->Length());
  if (!header) return false;
  OPTSTATE_ASSIGN_OR_RETURN(
      std::byte* const staging,
      session_.StagingFor(header->offset_bytes, header->data_bytes));
  if (!input.ReadRaw(staging, static_cast<int>(header->data_bytes))) {
    return absl::InternalError("gRPC's buffer is shorter than its length");
  }
  return true;
}

void GrpcStreamServer::WriteReplies() {
  ::pthread_setname_np(::pthread_self(), "grpc-replies");
  ParameterSender& parameters = session_.parameters();
  const auto write = [this](const v1::SessionReply& reply) {
    return stream_->Write(reply);
  };
  while (!replies_.over()) {
    auto reply = replies_.Pop(parameters.NextLook());
    const bool written =
        reply ? parameters.SendRest(&*reply, write) && write(*reply)
              : parameters.SendReady(write);
    if (written) continue;
    replies_.Abandon();
    return;
  }
}

void GrpcStreamServer::LogEnd(const absl::Status& end) const {
  if (!absl::IsCancelled(end)) {
    observe::LogOfPeer(spdlog::level::warn, "session failed", "a rank",
                       "session failed: {} error=\"{}\"", session_.Name(),
                       end.ToString());
  } else if (!session_.attached()) {
    observe::LogOfPeer(spdlog::level::info, "connection ended", "a rank",
                       "connection ended: {} reason=\"{}\"", session_.Name(),
                       end.ToString());
  }
}

}  // namespace optstate::transport
