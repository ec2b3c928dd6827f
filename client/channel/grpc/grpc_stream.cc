#include "client/channel/grpc/grpc_stream.h"

#include <fcntl.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/slice.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel/transport_error.h"
#include "client/endpoint/interrupt.h"
#include "proto/shm/frame.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

enum class Event : intptr_t { kStarted = 1, kWritten, kRead, kFinished };

void* Tag(Event event) {
  return reinterpret_cast<void*>(static_cast<intptr_t>(event));
}

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(shm::kMessageBytesMax);
  arguments.SetMaxSendMessageSize(shm::kMessageBytesMax);
  // Retries are off, so that gRPC keeps no copies for them: Session reconnects
  // instead.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // The window holds whole chunks in flight instead of gRPC's 64 KiB.
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES,
                   4 * shm::kChunkBytesMax);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, shm::kChunkBytesMax);
  return arguments;
}

absl::Status FromGrpc(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return TransportError(
          absl::UnavailableError("the engine ended the session"));
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
      return TransportError(absl::UnavailableError(absl::StrCat(
          "the connection was lost (", status.error_message(), ")")));
    default:
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                          status.error_message());
  }
}

absl::Status Serialize(const v1::SessionRequest& request,
                       grpc::ByteBuffer* message) {
  bool own_buffer;
  const grpc::Status status =
      grpc::SerializationTraits<v1::SessionRequest>::Serialize(request, message,
                                                               &own_buffer);
  if (status.ok()) return absl::OkStatus();
  return absl::InternalError("the request cannot be serialised");
}

void AppendVarint(uint64_t value, std::string* to) {
  for (; value >= 0x80; value >>= 7) {
    to->push_back(static_cast<char>(value | 0x80));
  }
  to->push_back(static_cast<char>(value));
}

// Appends a field number and protobuf's wire type: 0 varint, 2 length and
// bytes.
void AppendTag(int field, int wire_type, std::string* to) {
  AppendVarint(static_cast<uint64_t>(field << 3 | wire_type), to);
}

// Returns a SessionRequest with a GradientChunk, up to its data, which comes
// last.
std::string ChunkHeader(uint64_t request_id, uint64_t offset_bytes,
                        uint64_t data_bytes) {
  std::string chunk;
  AppendTag(v1::GradientChunk::kOffsetBytesFieldNumber, 0, &chunk);
  AppendVarint(offset_bytes, &chunk);
  AppendTag(v1::GradientChunk::kDataFieldNumber, 2, &chunk);
  AppendVarint(data_bytes, &chunk);
  std::string header;
  AppendTag(v1::SessionRequest::kRequestIdFieldNumber, 0, &header);
  AppendVarint(request_id, &header);
  AppendTag(v1::SessionRequest::kGradientChunkFieldNumber, 2, &header);
  AppendVarint(chunk.size() + data_bytes, &header);
  return header + chunk;
}

// The thread sanitizer does not see libgrpc's code that counts references to a
// slice, so these calls tell it how the last release is ordered.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
void Lend(void* owner) { __tsan_release(owner); }
void Regain(void* owner) { __tsan_acquire(owner); }
#else
void Lend(void* /*owner*/) {}
void Regain(void* /*owner*/) {}
#endif

void Disown(void* owner) {
  Regain(owner);
  delete static_cast<std::shared_ptr<const void>*>(owner);
}

// Makes a slice of bytes that gRPC sends in place.
grpc::Slice Borrow(absl::Span<const std::byte> data,
                   std::shared_ptr<const void> owner) {
  auto* const lent = new std::shared_ptr<const void>(std::move(owner));
  Lend(lent);
  return grpc::Slice(const_cast<std::byte*>(data.data()), data.size(), &Disown,
                     lent);
}

// Returns the socket's inode; 0: `fd` is not a socket.
ino_t SocketInode(int fd) {
  struct stat info;
  return ::fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) ? info.st_ino : 0;
}

class Stream final : public GrpcStream {
 public:
  explicit Stream(UniqueFd socket)
      : socket_fd_(socket.get()),
        socket_inode_(SocketInode(socket_fd_)),
        stub_(grpc::CreateCustomInsecureChannelFromFd(
            "optstate", socket.release(), Arguments())) {}

  ~Stream() override {
    // The loop below would wait for a write that the engine does not take.
    if (OwnsSocket()) ::shutdown(socket_fd_, SHUT_RDWR);
    context_.TryCancel();
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  void Abandon() override {
    if (!OwnsSocket()) return;
    const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
    // The number stays occupied: gRPC's copies of objects still use it as
    // theirs.
    if (::dup3(nothing.get(), socket_fd_, O_CLOEXEC) < 0) ::close(socket_fd_);
  }

  absl::Status Start(absl::Time deadline, const InterruptCheck& interrupted) {
    // Messages are sent as bytes, because WriteChunk needs that.
    run_ = stub_.PrepareCall(&context_, "/optstate.v1.Session/Run", &queue_);
    run_->StartCall(Tag(Event::kStarted));
    while (!started_) OPTSTATE_RETURN_IF_ERROR(Pump(deadline, interrupted));
    return absl::OkStatus();
  }

  absl::Status Write(const v1::SessionRequest& request,
                     absl::Time deadline) override {
    grpc::ByteBuffer message;
    OPTSTATE_RETURN_IF_ERROR(Serialize(request, &message));
    return WriteMessage(message, deadline);
  }

  absl::Status WriteChunk(uint64_t request_id, uint64_t offset_bytes,
                          absl::Span<const std::byte> data,
                          std::shared_ptr<const void> owner,
                          absl::Time deadline) override {
    const grpc::Slice slices[] = {
        grpc::Slice(ChunkHeader(request_id, offset_bytes, data.size())),
        Borrow(data, std::move(owner))};
    return WriteMessage(grpc::ByteBuffer(slices, 2), deadline);
  }

  absl::StatusOr<v1::SessionReply> Read(
      absl::Time deadline, const InterruptCheck& interrupted) override {
    while (replies_.empty()) {
      OPTSTATE_RETURN_IF_ERROR(Pump(deadline, interrupted));
    }
    v1::SessionReply reply = std::move(replies_.front());
    replies_.pop_front();
    return reply;
  }

 private:
  // Returns whether the socket is still open: gRPC may have closed it, and its
  // number may have been reused.
  bool OwnsSocket() const {
    return socket_inode_ != 0 && SocketInode(socket_fd_) == socket_inode_;
  }

  absl::Status WriteMessage(const grpc::ByteBuffer& message,
                            absl::Time deadline) {
    while (writing_) OPTSTATE_RETURN_IF_ERROR(Pump(deadline, nullptr));
    writing_ = true;
    run_->Write(message, Tag(Event::kWritten));
    return absl::OkStatus();
  }

  // Waits for one event and acts on it. After any error except CANCELLED the
  // stream is unusable.
  absl::Status Pump(absl::Time deadline, const InterruptCheck& interrupted) {
    while (true) {
      const absl::Time slice_end = absl::Now() + kInterruptSlice;
      const absl::Time until =
          interrupted ? std::min(slice_end, deadline) : deadline;
      void* tag;
      bool ok = false;
      switch (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(until))) {
        case grpc::CompletionQueue::GOT_EVENT:
          return OnEvent(static_cast<Event>(reinterpret_cast<intptr_t>(tag)),
                         ok);
        case grpc::CompletionQueue::TIMEOUT:
          if (until == deadline) {
            return NoAnswerError();
          }
          OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
          break;
        case grpc::CompletionQueue::SHUTDOWN:
          return absl::InternalError("the completion queue is closed");
      }
    }
  }

  absl::Status OnEvent(Event event, bool ok) {
    if (event == Event::kFinished) return FromGrpc(status_);
    if (!ok) {
      Finish();
      return absl::OkStatus();
    }
    switch (event) {
      case Event::kStarted:
        started_ = true;
        break;
      case Event::kWritten:
        writing_ = false;
        return absl::OkStatus();
      case Event::kRead:
        replies_.emplace_back();
        if (!grpc::SerializationTraits<v1::SessionReply>::Deserialize(
                 &reply_, &replies_.back())
                 .ok()) {
          return absl::InternalError("the engine's reply is not understood");
        }
        break;
      case Event::kFinished:
        break;
    }
    run_->Read(&reply_, Tag(Event::kRead));
    return absl::OkStatus();
  }

  // Asks gRPC for the reason of the connection's end; the answer ends the next
  // Pump.
  void Finish() {
    if (std::exchange(finishing_, true)) return;
    run_->Finish(&status_, Tag(Event::kFinished));
  }

  const int socket_fd_;  // gRPC's
  const ino_t socket_inode_;
  // The order matters: a running call needs the objects before it.
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> run_;
  bool started_ = false;
  bool writing_ = false;
  bool finishing_ = false;
  grpc::Status status_;
  grpc::ByteBuffer reply_;
  // At most one reply for each outstanding request, and the chunks of one read.
  std::deque<v1::SessionReply> replies_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcStream>> GrpcStream::Open(
    UniqueFd socket, absl::Time deadline, const InterruptCheck& interrupted) {
  auto stream = std::make_unique<Stream>(std::move(socket));
  OPTSTATE_RETURN_IF_ERROR(stream->Start(deadline, interrupted));
  return stream;
}

}  // namespace optstate::client
