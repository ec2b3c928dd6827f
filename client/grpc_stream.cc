#include "client/grpc_stream.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/channel_arguments.h>

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transport_error.h"
#include "optstate/v1/session.grpc.pb.h"
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
  // A stream is not retried, Session reconnects; so keep no copies for it.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Whole chunks in flight instead of gRPC's 64 KiB.
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

class Stream final : public GrpcStream {
 public:
  explicit Stream(UniqueFd socket)
      : stub_(v1::Session::NewStub(grpc::CreateCustomInsecureChannelFromFd(
            "optstate", socket.release(), Arguments()))) {}

  ~Stream() override {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  absl::Status Start(absl::Time deadline) {
    run_ = stub_->PrepareAsyncRun(&context_, &queue_);
    run_->StartCall(Tag(Event::kStarted));
    while (!started_) OPTSTATE_RETURN_IF_ERROR(Pump(deadline));
    return absl::OkStatus();
  }

  absl::Status Write(const v1::SessionRequest& request,
                     absl::Time deadline) override {
    while (writing_) OPTSTATE_RETURN_IF_ERROR(Pump(deadline));
    writing_ = true;
    run_->Write(request, Tag(Event::kWritten));
    return absl::OkStatus();
  }

  absl::StatusOr<v1::SessionReply> Read(absl::Time deadline) override {
    while (replies_.empty()) OPTSTATE_RETURN_IF_ERROR(Pump(deadline));
    v1::SessionReply reply = std::move(replies_.front());
    replies_.pop_front();
    return reply;
  }

 private:
  // Waits for one event and acts on it. An error: the stream is of no use
  // any more.
  absl::Status Pump(absl::Time deadline) {
    void* tag;
    bool ok = false;
    switch (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(deadline))) {
      case grpc::CompletionQueue::GOT_EVENT:
        return OnEvent(static_cast<Event>(reinterpret_cast<intptr_t>(tag)), ok);
      case grpc::CompletionQueue::TIMEOUT:
        return absl::DeadlineExceededError("the engine did not answer");
      case grpc::CompletionQueue::SHUTDOWN:
        break;
    }
    return absl::InternalError("the completion queue is closed");
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
        replies_.push_back(std::move(reply_));
        break;
      case Event::kFinished:
        break;
    }
    run_->Read(&reply_, Tag(Event::kRead));
    return absl::OkStatus();
  }

  // The connection ended: asks how. Its answer ends the next Pump.
  void Finish() {
    if (std::exchange(finishing_, true)) return;
    run_->Finish(&status_, Tag(Event::kFinished));
  }

  // In this order: what runs needs what it runs on.
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<v1::Session::Stub> stub_;
  std::unique_ptr<
      grpc::ClientAsyncReaderWriter<v1::SessionRequest, v1::SessionReply>>
      run_;
  bool started_ = false;
  bool writing_ = false;
  bool finishing_ = false;
  grpc::Status status_;
  v1::SessionReply reply_;
  // At most one for each request that is out, and the chunks of one read.
  std::deque<v1::SessionReply> replies_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcStream>> GrpcStream::Open(
    UniqueFd socket, absl::Time deadline) {
  auto stream = std::make_unique<Stream>(std::move(socket));
  OPTSTATE_RETURN_IF_ERROR(stream->Start(deadline));
  return stream;
}

}  // namespace optstate::client
