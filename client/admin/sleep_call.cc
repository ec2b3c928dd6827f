#include "client/admin/sleep_call.h"

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/endpoint/interrupt.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr absl::string_view kGoesOn =
    "the daemon goes on; `optctl describe job` says how far it is";

// A call that streams SleepProgress. The calling thread does all of its work.
//
// Threads: one at a time.
class SleepStream {
 public:
  using Reader = grpc::ClientAsyncReader<v1::SleepProgress>;
  // Begins the call.
  using Begin = absl::FunctionRef<std::unique_ptr<Reader>(
      grpc::ClientContext*, grpc::CompletionQueue*)>;

  SleepStream(const AdminConnection& connection, Begin begin) {
    connection.SayWhoCalls(&context_);
    reader_ = begin(&context_, &queue_);
  }
  ~SleepStream() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  SleepStream(const SleepStream&) = delete;
  SleepStream& operator=(const SleepStream&) = delete;

  enum class Came { kNothing, kMessage, kEnd };
  // Waits for what comes next, until a time.
  Came Await(absl::Time until) {
    void* tag;
    bool ok = false;
    if (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(until)) !=
        grpc::CompletionQueue::GOT_EVENT) {
      return Came::kNothing;
    }
    if (is_finishing_) return Came::kEnd;
    if (!ok) {
      is_finishing_ = true;
      reader_->Finish(&status_, nullptr);
      return Came::kNothing;
    }
    const bool has_read = std::exchange(reads_, true);
    if (has_read) message_ = std::move(next_);
    reader_->Read(&next_, nullptr);
    return has_read ? Came::kMessage : Came::kNothing;
  }
  // The message, after kMessage.
  const v1::SleepProgress& message() const { return message_; }
  // How the call has ended, after kEnd.
  const grpc::Status& status() const { return status_; }

 private:
  // The order matters: a running call needs the objects before it.
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<Reader> reader_;
  // One operation is under way at any time: the start, a read, or the end.
  bool reads_ = false;
  bool is_finishing_ = false;
  v1::SleepProgress next_;
  v1::SleepProgress message_;
  grpc::Status status_;
};

absl::Status Follow(const AdminConnection& connection, SleepStream::Begin begin,
                    const InterruptCheck& interrupted, OnSleepProgress progress,
                    absl::Time deadline) {
  SleepStream stream(connection, begin);
  absl::Time silent_at = absl::Now() + connection.timeout();
  while (true) {
    const absl::Time until =
        std::min({absl::Now() + kInterruptSlice, silent_at, deadline});
    switch (stream.Await(until)) {
      case SleepStream::Came::kEnd:
        if (stream.status().ok()) return absl::OkStatus();
        return connection.Explain(stream.status());
      case SleepStream::Came::kMessage:
        silent_at = absl::Now() + connection.timeout();
        progress(stream.message());
        break;
      case SleepStream::Came::kNothing:
        break;
    }
    if (!CheckInterrupted(interrupted).ok()) {
      return absl::CancelledError(absl::StrCat("interrupted: ", kGoesOn));
    }
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(connection.endpoint().ToString(),
                       ": it takes longer than it was to take: ", kGoesOn));
    }
    if (now >= silent_at) return connection.Silent();
  }
}

absl::Status AwaitConnection(AdminConnection* connection,
                             const InterruptCheck& interrupted,
                             absl::Time deadline) {
  return connection->Await(
      std::min(deadline, absl::Now() + connection->timeout()), interrupted);
}

}  // namespace

absl::Status CallSleepJob(AdminConnection* connection, const std::string& job,
                          const InterruptCheck& interrupted,
                          OnSleepProgress progress, absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(AwaitConnection(connection, interrupted, deadline));
  v1::SleepJobRequest request;
  request.set_name(job);
  const auto begin = [&](grpc::ClientContext* context,
                         grpc::CompletionQueue* queue) {
    return connection->stub()->AsyncSleepJob(context, request, queue, nullptr);
  };
  return Follow(*connection, begin, interrupted, progress, deadline);
}

absl::Status CallWakeJob(AdminConnection* connection, const std::string& job,
                         const InterruptCheck& interrupted,
                         OnSleepProgress progress, absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(AwaitConnection(connection, interrupted, deadline));
  v1::WakeJobRequest request;
  request.set_name(job);
  const auto begin = [&](grpc::ClientContext* context,
                         grpc::CompletionQueue* queue) {
    return connection->stub()->AsyncWakeJob(context, request, queue, nullptr);
  };
  return Follow(*connection, begin, interrupted, progress, deadline);
}

}  // namespace optstate::client
