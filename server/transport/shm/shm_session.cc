#include "server/transport/shm/shm_session.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "proto/shm/ring.h"
#include "proto/types/conversions.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/transport/request_name.h"
#include "server/transport/request_size.h"
#include "spdlog/spdlog.h"

namespace optstate::transport {
namespace {

// Longest sleep of a session whose rank asks for nothing. Whatever concerns it
// ends the sleep: an entry of the ring, its socket, its process' end, a notice,
// Stop(). This bounds what a peer that wakes nobody, or a mistake, can cost,
// and is long, because a node has a thousand idle sessions.
constexpr absl::Duration kSleepMax = absl::Seconds(5);
// Time for the rest of a frame that has begun, and for an answer to be taken.
constexpr absl::Duration kFrameTimeout = absl::Seconds(5);
// Time to send the last reply to a peer that may not be reading any more.
constexpr absl::Duration kFarewellTimeout = absl::Milliseconds(100);
// A client whose pages do not follow its attach populates its gradient area
// between register and attach. The assumed rate is slower than any memory, so
// that only a peer that hangs is dropped.
constexpr double kPopulateBytesPerSecond = 32 << 20;
// Limit of notices on their way to a peer; further ones are dropped.
constexpr size_t kNoticesMax = 64;

}  // namespace

ShmSession::ShmSession(UniqueFd socket, Peer peer,
                       const Environment& environment)
    : socket_(std::move(socket)),
      link_(socket_.get(), peer.pid),
      environment_(environment),
      handler_({.job = environment.job,
                .table = environment.table,
                .wire = "shm",
                .transfer_bytes_max = shm::kWindowBytes,
                .interrupt = [this] { Stop("its peer is gone"); },
                .queues = [this] { return Queues(); }},
               std::move(peer), &link_),
      handshake_deadline_(absl::Now() + environment.handshake_timeout) {}

void ShmSession::Run() { End(Serve()); }

void ShmSession::Stop(absl::string_view why) {
  absl::MutexLock lock(&stop_mutex_);
  if (stop_.load()) return;
  stop_reason_ = std::string(why);
  stop_.store(true);
  // The shutdown ends a handshake that waits for a frame, and wakes the
  // watcher.
  ::shutdown(socket_.get(), SHUT_RD);
}

// The segments are there from before a rank is claimed until after that.
session::WireCounters::QueueLengths ShmSession::Queues() const {
  const shm::RingSide& client = *segments_->client_ring();
  const shm::RingSide& engine = *segments_->engine_ring();
  return {.requests = shm::EntriesInUse(client, engine),
          .replies = shm::EntriesInUse(engine, client)};
}

absl::Status ShmSession::StopReason() const {
  absl::MutexLock lock(&stop_mutex_);
  return absl::UnavailableError(stop_reason_);
}

absl::Status ShmSession::Serve() {
  OPTSTATE_RETURN_IF_ERROR(Handshake());
  OPTSTATE_RETURN_IF_ERROR(WatchPeer());
  return ServeRing();
}

absl::Status ShmSession::Handshake() {
  while (!handler_.attached()) {
    shm::Frame frame;
    OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionRequest request,
                              Receive(handshake_deadline_, &frame));
    switch (request.op_case()) {
      case v1::SessionRequest::kRegister:
        OPTSTATE_RETURN_IF_ERROR(AnswerRegister(request));
        break;
      case v1::SessionRequest::kAttach:
        OPTSTATE_RETURN_IF_ERROR(AnswerAttach(std::move(frame), request));
        break;
      case v1::SessionRequest::kPosition:
        OPTSTATE_RETURN_IF_ERROR(AnswerPosition(request));
        break;
      case v1::SessionRequest::kDecide:
        OPTSTATE_RETURN_IF_ERROR(AnswerDecide(request));
        break;
      case v1::SessionRequest::kDetach:
        return AnswerDetach(request);
      default:
        return absl::InvalidArgumentError(
            absl::StrCat(RequestName(request),
                         " on the socket; over shared memory it takes ",
                         "register, attach, position, decide and detach "
                         "alone"));
    }
    large_.reset();
  }
  return absl::OkStatus();
}

absl::Status ShmSession::AnswerRegister(const v1::SessionRequest& request) {
  v1::SessionReply reply;
  reply.set_request_id(request.request_id());
  auto result = handler_.Register(request.register_());
  *reply.mutable_status() = ToProto(result.status());
  if (result.ok()) {
    v1::AttachRequest attach;
    attach.set_rank(request.register_().rank());
    attach.set_layout_hash(result->layout_hash());
    attach.set_fetches_parameters(true);  // only the gradients count here
    const auto plan = handler_.PlanAttach(attach);
    const double bytes =
        plan.ok() ? static_cast<double>(plan->gradient_area_bytes) : 0;
    handshake_deadline_ = absl::Now() + environment_.handshake_timeout +
                          absl::Seconds(bytes / kPopulateBytesPerSecond);
    *reply.mutable_register_() = *std::move(result);
    reply.mutable_register_()->set_pages_may_follow(true);
  }
  return Send(reply, {});
}

absl::Status ShmSession::AnswerPosition(const v1::SessionRequest& request) {
  v1::SessionReply reply;
  reply.set_request_id(request.request_id());
  auto position = handler_.Position();
  *reply.mutable_status() = ToProto(position.status());
  if (position.ok()) *reply.mutable_position() = *std::move(position);
  return Send(reply, {});
}

absl::Status ShmSession::AnswerDecide(const v1::SessionRequest& request) {
  v1::SessionReply reply;
  reply.set_request_id(request.request_id());
  auto outcome = handler_.DecideUnattached(request.decide());
  *reply.mutable_status() = ToProto(outcome.status());
  if (outcome.ok()) *reply.mutable_outcome() = *std::move(outcome);
  return Send(reply, {});
}

absl::Status ShmSession::AnswerAttach(shm::Frame frame,
                                      const v1::SessionRequest& request) {
  v1::SessionReply reply;
  reply.set_request_id(request.request_id());
  AttachPlan plan;
  auto attached = Attach(std::move(frame), request.attach(), &plan);
  *reply.mutable_status() = ToProto(attached.status());
  if (!attached.ok()) return Send(reply, {});
  *reply.mutable_attach() = *std::move(attached);
  reply.mutable_attach()->set_shares_parameters(!plan.fetches_parameters);
  reply.mutable_attach()->set_shares_gradients(true);
  std::vector<int> fds = {segments_->completion_fd()};
  if (plan.fetches_parameters) return Send(reply, fds);
  fds.push_back(plan.parameters.get());
  if (request.attach().takes_run_stamps() && plan.run_stamps.ok()) {
    fds.push_back(plan.run_stamps.get());
  }
  return Send(reply, fds);
}

absl::StatusOr<v1::AttachReply> ShmSession::Attach(
    shm::Frame frame, const v1::AttachRequest& request, AttachPlan* plan) {
  OPTSTATE_ASSIGN_OR_RETURN(*plan, handler_.PlanAttach(request));
  if (frame.fds.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach came with ", frame.fds.size(),
                     " fds, expected the client segment's alone"));
  }
  plan->gradient_segment.reset(::fcntl(frame.fds[0].get(), F_DUPFD_CLOEXEC, 0));
  if (!plan->gradient_segment.ok()) {
    return OsError(errno, "fcntl(F_DUPFD_CLOEXEC) of the client segment");
  }
  OPTSTATE_ASSIGN_OR_RETURN(ShmSegments segments,
                            ShmSegments::Open(std::move(frame.fds[0]), *plan));
  plan->gradients_present = true;  // the memory is the rank's own
  plan->gradient_offset_bytes = segments.gradient_offset_bytes();
  segments_ = std::move(segments);
  OPTSTATE_RETURN_IF_ERROR(ExpectPages(plan));
  writer_ = std::make_unique<CompletionWriter>(
      &*segments_, &handler_,
      [this](absl::string_view text) { NoteNotice(text); },
      [this] { ring_->Interrupt(); });
  ring_ = std::make_unique<RingServer>(&*segments_, &handler_, writer_.get(),
                                       plan->group_count,
                                       pages_ ? &*pages_ : nullptr);
  OPTSTATE_RETURN_IF_ERROR(handler_.Claim(*plan));
  absl::StatusOr<v1::AttachReply> attached =
      handler_.Attach(*plan, segments_->gradient_area(), writer_.get());
  if (!attached.ok()) handler_.Unclaim();
  return attached;
}

// Prepares the checks of pages that follow the attach.
absl::Status ShmSession::ExpectPages(AttachPlan* plan) {
  pages_.reset();
  if (!plan->pages_follow) return absl::OkStatus();
  UniqueFd segment(::fcntl(plan->gradient_segment.get(), F_DUPFD_CLOEXEC, 0));
  if (!segment.ok()) {
    return OsError(errno, "fcntl(F_DUPFD_CLOEXEC) of the client segment");
  }
  pages_.emplace(std::move(segment), segments_->client_bytes(),
                 segments_->gradient_offset_bytes(),
                 std::move(plan->gradient_ends));
  plan->gradient_bytes_present = pages_->present_bytes();
  return absl::OkStatus();
}

absl::Status ShmSession::AnswerDetach(const v1::SessionRequest& request) {
  // The rank leaves before the answer, so that it is free when the peer reads
  // that.
  handler_.Leave(request.detach());
  v1::SessionReply reply;
  reply.set_request_id(request.request_id());
  *reply.mutable_status() = ToProto(absl::OkStatus());
  Send(reply, {}).IgnoreError();
  return absl::CancelledError("detached by its rank");
}

// A refusal is no error of the session, which has the parameter file.
absl::Status ShmSession::AnswerShareParameters(
    const v1::SessionRequest& request) {
  v1::SessionReply reply;
  reply.set_request_id(request.request_id());
  *reply.mutable_status() = ToProto(absl::OkStatus());
  v1::ShareParametersReply& body = *reply.mutable_share_parameters();
  const auto shared =
      environment_.job->ShareParameters(request.share_parameters().device());
  if (!shared.ok()) {
    *body.mutable_refused() = ToProto(shared.status());
    return Send(reply, {});
  }
  body.set_device_index(shared->device_index);
  body.set_memory_bytes(shared->memory_bytes);
  return Send(reply, {shared->table.get(), shared->memory.get()});
}

// A refusal is no error of the session, whose gradient area has all gradients.
absl::Status ShmSession::AnswerShareGradients(
    shm::Frame frame, const v1::SessionRequest& request) {
  const v1::ShareGradientsRequest& body = request.share_gradients();
  const size_t expected = body.memory_bytes() == 0 ? 0 : 2;
  if (frame.fds.size() != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("share_gradients of ", body.memory_bytes(),
                     " bytes came with ", frame.fds.size(), " fds, expected ",
                     expected, ": a table and a memory, or none for no bytes"));
  }
  session::DeviceGradients gradients;
  gradients.memory_bytes = body.memory_bytes();
  if (expected == 2) {
    gradients.table = std::move(frame.fds[0]);
    gradients.memory = std::move(frame.fds[1]);
  }
  const absl::Status shared = environment_.job->ShareGradients(
      handler_.rank(), body.device(), std::move(gradients));
  v1::SessionReply reply;
  reply.set_request_id(request.request_id());
  *reply.mutable_status() = ToProto(absl::OkStatus());
  v1::ShareGradientsReply& answer = *reply.mutable_share_gradients();
  if (!shared.ok()) *answer.mutable_refused() = ToProto(shared);
  return Send(reply, {});
}

absl::Status ShmSession::WatchPeer() {
  OPTSTATE_ASSIGN_OR_RETURN(socket_watch_,
                            environment_.watcher->Watch(socket_.get(), [this] {
                              socket_event_.store(true);
                              ring_->Interrupt();
                            }));
  if (link_.process() < 0) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(
      process_watch_, environment_.watcher->Watch(link_.process(), [this] {
        process_ended_.store(true);
        ring_->Interrupt();
      }));
  return absl::OkStatus();
}

absl::Status ShmSession::ServeRing() {
  while (true) {
    OPTSTATE_RETURN_IF_ERROR(CheckEvents());
    OPTSTATE_ASSIGN_OR_RETURN(const shm::Poll served, ring_->ServeOne());
    if (served == shm::Poll::kEmpty && !ring_->WorkAhead()) {
      ring_->Wait(environment_.spin->Spin(), kSleepMax);
    }
  }
}

// Each flag was set before the interrupt that ended a sleep, and the sleep
// takes the interrupt back before the flags are read here: all in one order
// (seq_cst).
absl::Status ShmSession::CheckEvents() {
  if (stop_.load()) return StopReason();
  if (process_ended_.load()) {
    return absl::CancelledError(
        absl::StrCat("process ", handler_.peer().pid, " ended"));
  }
  if (has_notices_.load()) SendNotices();
  if (!socket_event_.load()) return absl::OkStatus();
  socket_event_.store(false);
  OPTSTATE_RETURN_IF_ERROR(AnswerSocket());
  environment_.watcher->Rearm(*socket_watch_);
  return absl::OkStatus();
}

absl::Status ShmSession::AnswerSocket() {
  pollfd socket = {socket_.get(), POLLIN, 0};
  if (::poll(&socket, 1, 0) <= 0) return absl::OkStatus();
  shm::Frame frame;
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionRequest request,
                            Receive(absl::Now() + kFrameTimeout, &frame));
  // No such request is large, whatever its peer has added to it.
  large_.reset();
  switch (request.op_case()) {
    case v1::SessionRequest::kDetach:
      return AnswerDetach(request);
    case v1::SessionRequest::kShareParameters:
      return AnswerShareParameters(request);
    case v1::SessionRequest::kShareGradients:
      return AnswerShareGradients(std::move(frame), request);
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          RequestName(request),
          " on the socket of an attached session; it takes detach, "
          "share_parameters and share_gradients, the rest goes through the "
          "ring"));
  }
}

void ShmSession::NoteNotice(absl::string_view text) {
  if (!handler_.takes_notices()) return;
  {
    absl::MutexLock lock(&notice_mutex_);
    if (notices_.size() == kNoticesMax) return;
    notices_.emplace_back(text);
    has_notices_.store(true);
  }
  ring_->Interrupt();
}

// Sends notices and drops those that the socket does not take at once: a peer
// that reads late does not need them. A peer's end is detected elsewhere.
void ShmSession::SendNotices() {
  std::vector<std::string> notices;
  {
    absl::MutexLock lock(&notice_mutex_);
    notices.swap(notices_);
    has_notices_.store(false);
  }
  for (std::string& text : notices) {
    v1::SessionReply reply;
    reply.mutable_notice()->set_text(std::move(text));
    // A frame is never half sent: one so short is a single buffer of the
    // socket.
    const absl::Status sent = shm::SendFrame(
        socket_.get(), reply.SerializeAsString(), {}, absl::InfinitePast());
    if (!sent.ok()) return;
  }
}

void ShmSession::End(const absl::Status& why) {
  large_.reset();
  // The order matters: first nothing interrupts the ring any more, then nothing
  // answers into it, then the peer is told, and only then memory and socket are
  // released.
  if (socket_watch_) environment_.watcher->Forget(*socket_watch_);
  if (process_watch_) environment_.watcher->Forget(*process_watch_);
  const bool by_peer = absl::IsCancelled(why);
  if (!by_peer && !absl::IsUnavailable(why)) {
    handler_.traffic().CountAnswer(why);
    observe::LogOfPeer(spdlog::level::warn, "session failed", "a rank",
                       "session failed: {} error=\"{}\"", handler_.Name(),
                       why.ToString());
  } else if (!handler_.attached()) {
    observe::LogOfPeer(spdlog::level::info, "connection ended", "a rank",
                       "connection ended: {} reason=\"{}\"", handler_.Name(),
                       why.ToString());
  }
  handler_.Detach(std::string(why.message()));
  if (by_peer) return;
  v1::SessionReply farewell;
  *farewell.mutable_status() = ToProto(why);
  shm::SendFrame(socket_.get(), farewell.SerializeAsString(), {},
                 absl::Now() + kFarewellTimeout)
      .IgnoreError();
}

absl::StatusOr<v1::SessionRequest> ShmSession::Receive(absl::Time deadline,
                                                       shm::Frame* frame) {
  auto received =
      shm::ReceiveFrame(socket_.get(), shm::kFrameBytesMax, deadline);
  if (!received.ok()) {
    if (stop_.load(std::memory_order_acquire)) return StopReason();
    if (!absl::IsUnavailable(received.status())) return received.status();
    return absl::CancelledError(received.status().message());
  }
  *frame = *std::move(received);
  google::protobuf::io::ArrayInputStream payload(
      frame->payload.data(), static_cast<int>(frame->payload.size()));
  OPTSTATE_ASSIGN_OR_RETURN(const bool is_large,
                            AdmitRequest(&payload, frame->payload.size()));
  if (is_large) large_.emplace(&environment_.table->large_request());
  v1::SessionRequest request;
  if (!request.ParseFromString(frame->payload)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a frame of ", frame->payload.size(), " bytes is no SessionRequest"));
  }
  return request;
}

absl::Status ShmSession::Send(const v1::SessionReply& reply,
                              absl::Span<const int> fds) {
  handler_.traffic().CountAnswer(FromProto(reply.status()));
  absl::Status sent = shm::SendFrame(socket_.get(), reply.SerializeAsString(),
                                     fds, absl::Now() + kFrameTimeout);
  if (absl::IsUnavailable(sent)) return absl::CancelledError(sent.message());
  return sent;
}

}  // namespace optstate::transport
