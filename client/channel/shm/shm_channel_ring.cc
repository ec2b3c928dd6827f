// The part of ShmChannel that submits requests and collects their answers.

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/channel/shm/shm_channel.h"
#include "client/channel/transport_error.h"
#include "client/endpoint/interrupt.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

using shm::Completion;
using shm::CompletionSegmentLayout;
using shm::Op;
using shm::Submission;

// The limit for the rest of a frame that has begun to arrive.
constexpr absl::Duration kFrameTimeout = absl::Milliseconds(100);

}  // namespace

absl::StatusOr<ShmChannel::Pending*> ShmChannel::Submit(Op op,
                                                        Submission submission,
                                                        absl::Time deadline) {
  Pending* const pending = &pending_[(last_request_id_ + 1) % kPendingMax];
  // The slot, and with it a place in both rings, is free once the request made
  // kPendingMax requests ago is answered.
  OPTSTATE_RETURN_IF_ERROR(
      WaitUntil([&] { return pending->request_id == 0; }, deadline));
  submission.op = static_cast<uint16_t>(op);
  submission.request_id = ++last_request_id_;
  pending->request_id = submission.request_id;
  pending->op = op;
  pending->step = submission.step;
  pending->answered = false;
  const absl::Status pushed = producer_->Push(submission);
  if (!pushed.ok()) return Lose(pushed);
  if (op == Op::kPush) ++pending_pushes_;
  return pending;
}

absl::Status ShmChannel::Await(Pending* pending, absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(
      WaitUntil([&] { return pending->answered; }, deadline));
  pending->request_id = 0;
  return std::exchange(pending->status, absl::OkStatus());
}

absl::Status ShmChannel::SubmitAndAwait(Op op, const Submission& submission,
                                        absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(Pending* const pending,
                            Submit(op, submission, deadline));
  return Await(pending, deadline);
}

absl::Status ShmChannel::WaitUntil(absl::FunctionRef<bool()> done,
                                   absl::Time deadline,
                                   const InterruptCheck& interrupted,
                                   Meanwhile meanwhile) {
  if (!connected()) return NotConnectedError();
  absl::Time ask = absl::Now() + kInterruptSlice;
  while (!done()) {
    // The socket is checked before the ring, so that answers given by an engine
    // before it died still count.
    const bool speaks = PeerSpeaks();
    OPTSTATE_ASSIGN_OR_RETURN(const bool progress, TakeCompletions());
    if (progress) continue;
    if (speaks) {
      const absl::Status ended = HearPeer();
      if (!ended.ok()) return Lose(ended);
    }
    const absl::Time now = absl::Now();
    const absl::Duration left = deadline - now;
    if (left <= absl::ZeroDuration()) {
      return Lose(NoAnswerError());
    }
    if (now >= ask) {
      OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
      ask = now + kInterruptSlice;
    }
    const absl::Duration sleep = std::min({LongestSleep(), meanwhile(), left});
    consumer_->Wait(std::min(spin_, sleep), sleep);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ShmChannel::TakeCompletions() {
  bool progress = false;
  while (true) {
    Completion completion;
    absl::StatusOr<shm::Poll> poll = consumer_->Take(&completion);
    if (!poll.ok()) return Lose(poll.status());
    if (*poll == shm::Poll::kEmpty) return progress;
    const absl::Status status = Record(completion);
    if (!status.ok()) return Lose(status);
    consumer_->Release();
    progress = true;
  }
}

// Files an answer under its request. An error: the engine broke the protocol.
absl::Status ShmChannel::Record(const Completion& completion) {
  Pending* const pending = &pending_[completion.request_id % kPendingMax];
  if (completion.request_id == 0 || pending->answered ||
      pending->request_id != completion.request_id) {
    return absl::InternalError(absl::StrCat("the engine answered request ",
                                            completion.request_id,
                                            ", which is not open"));
  }
  absl::Status status;
  if (completion.status != 0) {
    v1::OpStatus proto;
    proto.set_code(static_cast<int32_t>(completion.status));
    proto.set_message(TextOf(completion));
    status = FromProto(proto);
  }
  if (pending->op == Op::kPush) {
    --pending_pushes_;
    pending->request_id = 0;
    if (!status.ok()) NoteFailedPush(pending->step, std::move(status));
    return absl::OkStatus();
  }
  pending->answered = true;
  pending->status = std::move(status);
  pending->completion = completion;
  pending->durable_step = pending->status.ok() ? DurableStepOf(completion) : 0;
  return absl::OkStatus();
}

uint64_t ShmChannel::DurableStepOf(const Completion& completion) const {
  uint64_t step = 0;
  if (completion.text_bytes != sizeof(step)) return 0;
  const std::string text = TextOf(completion);
  std::memcpy(&step, text.data(), sizeof(step));
  return step;
}

std::string ShmChannel::TextOf(const Completion& completion) const {
  const uint64_t slot = consumer_->head() % shm::kRingEntries;
  const auto* text = InCompletions<char>(CompletionSegmentLayout::kText +
                                         slot * shm::kTextBytes);
  return std::string(
      text, std::min<uint64_t>(completion.text_bytes, shm::kTextBytes));
}

// Returns whether the socket has something to read: once the rings are in use,
// that is a notice or the connection's end.
bool ShmChannel::PeerSpeaks() const {
  pollfd entry = {.fd = socket_.get(), .events = POLLIN, .revents = 0};
  return poll(&entry, 1, 0) > 0;
}

// Reads the socket; OK: a notice. An engine that ends a session on purpose
// sends the reason; an engine that died cannot.
absl::Status ShmChannel::HearPeer() const {
  v1::SessionReply said;
  absl::StatusOr<shm::Frame> frame = shm::ReceiveFrame(
      socket_.get(), shm::kFrameBytesMax, absl::Now() + kFrameTimeout);
  if (frame.ok() && said.ParseFromString(frame->payload)) {
    if (said.has_notice()) {
      setup_.notice(said.notice().text());
      return absl::OkStatus();
    }
    absl::Status farewell = FromProto(said.status());
    if (absl::IsUnavailable(farewell)) return TransportError(farewell);
    if (!farewell.ok()) return farewell;
  }
  return TransportError(
      absl::UnavailableError("the engine closed the connection"));
}

}  // namespace optstate::client
