#include "client/channel/shm/shm_channel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/channel/handshake.h"
#include "client/channel/transport_error.h"
#include "client/endpoint/interrupt.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

using shm::ClientSegmentLayout;
using shm::CompletionSegmentLayout;
using shm::Op;
using shm::Submission;

constexpr absl::Duration kSpin = absl::Microseconds(50);
constexpr absl::Duration kDetachTimeout = absl::Seconds(5);
constexpr char kSegmentName[] = "optstate-client";

// The spin time. A spinning rank takes its core from the process that it waits
// for, unless there are cores to spare.
absl::Duration SpinFor(uint32_t local_world_size) {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) {
    return absl::ZeroDuration();
  }
  const bool spare = CPU_COUNT(&cores) > static_cast<int>(local_world_size);
  return spare ? kSpin : absl::ZeroDuration();
}

}  // namespace

ShmChannel::ShmChannel(Endpoint endpoint, ChannelSetup setup,
                       PopulateFunction populate)
    : endpoint_(std::move(endpoint)),
      setup_(std::move(setup)),
      segment_layout_(setup_.layout.groups().size(),
                      setup_.partition.gradient_area_bytes,
                      shm::GradientLeadBytes(setup_.rank)),
      spin_(SpinFor(setup_.local_world_size)),
      populate_pages_(std::move(populate)),
      populate_(populate_pages_) {}

ShmChannel::~ShmChannel() { Disconnect().IgnoreError(); }

absl::Span<std::byte> ShmChannel::gradient_area() {
  return {segment_.data() + segment_layout_.gradient_area,
          setup_.partition.gradient_area_bytes};
}

// The part of the segment that is populated after the attach.
absl::Span<std::byte> ShmChannel::gradient_pages() const {
  const uint64_t begin = segment_layout_.gradient_pages();
  return {segment_.data() + begin, segment_.size() - begin};
}

absl::Status ShmChannel::AwaitGradientArea(uint64_t bytes) {
  if (is_reserved_) return absl::OkStatus();
  const uint64_t lead =
      segment_layout_.gradient_area - segment_layout_.gradient_pages();
  return populate_.Await(lead + bytes, setup_.interrupted);
}

absl::Span<const std::byte> ShmChannel::parameter_area() const {
  if (setup_.fetches_parameters) return {};
  return parameters_.bytes().subspan(0, setup_.layout.parameter_area_bytes());
}

absl::StatusOr<Attached> ShmChannel::Connect(bool must_exist,
                                             absl::Time deadline) {
  Drop();
  OPTSTATE_ASSIGN_OR_RETURN(
      socket_, OpenConnection(endpoint_, v1::WIRE_SHM, setup_.job, must_exist,
                              setup_.two_phase, deadline, setup_.interrupted,
                              setup_.access));
  v1::SessionRequest request;
  *request.mutable_register_() = MakeRegister(setup_, must_exist);
  absl::StatusOr<v1::SessionReply> registered =
      Call(request, {}, nullptr, deadline);
  if (!registered.ok()) return Lose(registered.status());
  // The segment is created only now: a refused job must not have taken memory
  // from other jobs.
  const bool pages_may_follow = registered->register_().pages_may_follow();
  absl::Status created = CreateSegment(pages_may_follow);
  if (created.ok() && !pages_may_follow) created = ReserveForOlderEngine();
  if (!created.ok()) return Lose(created);
  absl::StatusOr<v1::AttachReply> attached = Attach(deadline);
  if (!attached.ok()) return Lose(attached.status());
  absl::StatusOr<Attached> result =
      MakeAttached(setup_, registered->register_(), *attached);
  if (!result.ok()) return Lose(result.status());
  // Populating begins only now: earlier it would take a core from the attaching
  // engine.
  StartPopulating();
  return result;
}

// Creates the segment, with all of its pages or those before the gradients.
absl::Status ShmChannel::CreateSegment(bool pages_may_follow) {
  using Pages = shm::SealedSegment::Pages;
  if (segment_.data() != nullptr) return absl::OkStatus();
  if (pages_may_follow) {
    OPTSTATE_ASSIGN_OR_RETURN(
        shm::SealedSegment segment,
        shm::SealedSegment::Create(kSegmentName, segment_layout_.segment_bytes,
                                   Pages::kNone));
    absl::Status populated =
        populate_pages_(segment.data(), segment_layout_.gradient_pages());
    if (populated.ok()) segment_ = std::move(segment);
    if (!absl::IsUnimplemented(populated)) return populated;
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      segment_,
      shm::SealedSegment::Create(kSegmentName, segment_layout_.segment_bytes,
                                 Pages::kReserved));
  is_reserved_ = true;
  return absl::OkStatus();
}

// Takes all pages of a segment that was made for another engine than this one,
// which refuses a segment that lacks any.
absl::Status ShmChannel::ReserveForOlderEngine() {
  if (is_reserved_) return absl::OkStatus();
  StartPopulating();
  return AwaitGradientArea(setup_.partition.gradient_area_bytes);
}

void ShmChannel::StartPopulating() {
  if (!std::exchange(populating_, true)) populate_.Start(gradient_pages());
}

// Resets the segment to the state that an engine expects at attach: a ring at
// 0.
void ShmChannel::ResetSegment() {
  const std::string& hash = setup_.layout.hash();
  shm::ClientHeader* const h = header();
  h->magic = shm::kClientMagic;
  h->version = shm::kClientSegmentVersion;
  h->group_count = static_cast<uint32_t>(setup_.layout.groups().size());
  h->segment_bytes = segment_layout_.segment_bytes;
  h->gradient_area_bytes = setup_.partition.gradient_area_bytes;
  std::memcpy(h->layout_hash, hash.data(),
              std::min(sizeof(h->layout_hash), hash.size()));
  h->ring.produced_tail.store(0);
  h->ring.doorbell.store(0);
  h->ring.consumed_head.store(0);
  h->ring.waiting.store(0);
}

absl::StatusOr<v1::SessionReply> ShmChannel::Call(
    const v1::SessionRequest& request, absl::Span<const int> fds,
    std::vector<UniqueFd>* reply_fds, absl::Time deadline) {
  const absl::Status sent =
      shm::SendFrame(socket_.get(), request.SerializeAsString(), fds, deadline);
  // INVALID_ARGUMENT: the layout is too large for a frame, and stays so.
  if (absl::IsInvalidArgument(sent)) return sent;
  OPTSTATE_RETURN_IF_ERROR(TransportError(sent));
  OPTSTATE_RETURN_IF_ERROR(
      AwaitReadable(socket_.get(), deadline, setup_.interrupted));
  absl::StatusOr<shm::Frame> frame;
  v1::SessionReply reply;
  // A notice that no wait has read yet comes first.
  do {
    frame = shm::ReceiveFrame(socket_.get(), shm::kFrameBytesMax, deadline);
    if (!frame.ok()) return TransportError(frame.status());
    if (!reply.ParseFromString(frame->payload)) {
      return absl::InternalError("the daemon's reply is not understood");
    }
  } while (reply.has_notice());
  OPTSTATE_RETURN_IF_ERROR(FromProto(reply.status()));
  if (reply_fds != nullptr) *reply_fds = std::move(frame->fds);
  return reply;
}

absl::StatusOr<v1::AttachReply> ShmChannel::Attach(absl::Time deadline) {
  ResetSegment();
  v1::SessionRequest request;
  *request.mutable_attach() = MakeAttach(setup_);
  request.mutable_attach()->set_pages_follow(
      !is_reserved_ && !populate_.Has(gradient_pages().size()));
  const int fd = segment_.fd();
  std::vector<UniqueFd> fds;
  OPTSTATE_ASSIGN_OR_RETURN(v1::SessionReply reply,
                            Call(request, {&fd, 1}, &fds, deadline));
  OPTSTATE_RETURN_IF_ERROR(CheckFetches(setup_, reply.attach()));
  OPTSTATE_RETURN_IF_ERROR(MapSegments(std::move(fds)));
  shares_parameters_ = reply.attach().shares_parameters();
  shares_gradients_ = reply.attach().shares_gradients();
  return std::move(*reply.mutable_attach());
}

absl::Status ShmChannel::MapSegments(std::vector<UniqueFd> fds) {
  const bool fetches = setup_.fetches_parameters;
  if (fetches ? fds.size() != 1 : fds.size() != 2 && fds.size() != 3) {
    return absl::InternalError(
        absl::StrCat("the daemon sent ", fds.size(), " segments where ",
                     fetches ? "1 belongs" : "2 or 3 belong"));
  }
  absl::StatusOr<shm::PeerSegment> completions = shm::PeerSegment::Map(
      std::move(fds[0]), CompletionSegmentLayout::kSegmentBytes);
  if (!completions.ok()) {
    return Annotate(completions.status(), "completion segment");
  }
  completions_ = *std::move(completions);
  OPTSTATE_RETURN_IF_ERROR(CheckCompletionHeader());
  if (!fetches) {
    OPTSTATE_RETURN_IF_ERROR(Annotate(
        parameters_.Replace(
            std::move(fds[1]),
            shm::ParameterSegmentBytes(setup_.layout.parameter_area_bytes())),
        "parameter file"));
  }
  has_run_stamps_ = fds.size() == 3;
  if (has_run_stamps_) {
    OPTSTATE_RETURN_IF_ERROR(Annotate(
        run_stamps_.Replace(std::move(fds[2]),
                            shm::RunStampsBytes(setup_.layout.run_count())),
        "run stamps"));
  }
  shm::RingSide* const mine = &header()->ring;
  const shm::RingSide* const peer =
      &InCompletions<shm::CompletionHeader>(0)->ring;
  producer_.emplace(mine, peer,
                    InSegment<Submission>(ClientSegmentLayout::kRing));
  consumer_.emplace(
      mine, peer,
      InCompletions<shm::Completion>(CompletionSegmentLayout::kRing));
  return absl::OkStatus();
}

absl::Status ShmChannel::CheckCompletionHeader() const {
  const auto* h = InCompletions<shm::CompletionHeader>(0);
  if (h->magic != shm::kCompletionMagic) {
    return absl::InternalError("completion segment: wrong magic number");
  }
  if (h->version != shm::kCompletionSegmentVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "completion segment of version ", h->version,
        "; this client reads version ", shm::kCompletionSegmentVersion));
  }
  const uint64_t area =
      setup_.fetches_parameters ? 0 : setup_.layout.parameter_area_bytes();
  if (h->segment_bytes != CompletionSegmentLayout::kSegmentBytes ||
      h->parameter_area_bytes != area) {
    return absl::InternalError(absl::StrCat(
        "completion segment says ", h->segment_bytes, " bytes and ",
        h->parameter_area_bytes, " of parameters; expected ",
        CompletionSegmentLayout::kSegmentBytes, " and ", area));
  }
  return absl::OkStatus();
}

absl::Status ShmChannel::Disconnect() {
  if (!connected()) return NotConnectedError();
  v1::SessionRequest request;
  request.mutable_detach();
  // The answer only confirms that the rank is free; the end of the socket also
  // tells a live engine that the rank leaves.
  return Lose(
      Call(request, {}, nullptr, absl::Now() + kDetachTimeout).status());
}

absl::Status ShmChannel::Farewell(absl::Time deadline) {
  v1::SessionRequest request;
  *request.mutable_detach() = MakeFarewell(setup_);
  return Ask(request, deadline).status();
}

absl::StatusOr<v1::SessionReply> ShmChannel::Ask(
    const v1::SessionRequest& request, absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(
      socket_,
      OpenConnection(endpoint_, v1::WIRE_SHM, setup_.job, /*must_exist=*/true,
                     setup_.two_phase, deadline, setup_.interrupted));
  absl::StatusOr<v1::SessionReply> reply = Call(request, {}, nullptr, deadline);
  Drop();
  return reply;
}

void ShmChannel::Abandon() { Drop(); }

void ShmChannel::Drop() {
  socket_.reset();
  producer_.reset();
  consumer_.reset();
  completions_ = shm::PeerSegment();
  last_request_id_ = 0;
  pending_pushes_ = 0;
  commit_ = nullptr;
  for (Pending& pending : pending_) pending.request_id = 0;
}

absl::Status ShmChannel::Lose(const absl::Status& status) {
  Drop();
  return status;
}

absl::Status ShmChannel::Push(const PushRange& range, absl::Time deadline) {
  Submission submission = {};
  submission.step = range.step;
  submission.micro_step = range.micro_step;
  submission.parameter = range.first_parameter;
  submission.numel = range.parameter_count;
  OPTSTATE_RETURN_IF_ERROR(Submit(Op::kPush, submission, deadline).status());
  // Answers that are there already cost nothing to read.
  return TakeCompletions().status();
}

absl::Status ShmChannel::Flush(absl::Time deadline) {
  return WaitUntil([this] { return pending_pushes_ == 0; }, deadline,
                   setup_.interrupted);
}

absl::Status ShmChannel::StartCommit(const CommitOptions& options,
                                     absl::Time deadline) {
  *InSegment<shm::CommitSettings>(ClientSegmentLayout::kSettings) = {
      .max_value = options.max_value,
      .norm_type = options.norm_type,
      .reserved = {}};
  auto* groups = InSegment<shm::CommitGroup>(ClientSegmentLayout::kGroups);
  for (size_t i = 0; i < options.groups.size(); ++i) {
    const Hyperparams& from = options.groups[i];
    shm::CommitGroup to = {};
    std::copy(from.value.begin(), from.value.end(), to.value);
    to.max_norm = from.max_norm;
    if (!options.clips_with.empty()) to.clips_with = options.clips_with[i];
    *groups++ = to;
  }
  Submission submission = {};
  submission.step = options.step;
  submission.flags = static_cast<uint16_t>(
      (options.found_inf ? shm::kSubmissionFoundInf : 0) |
      (setup_.two_phase ? shm::kSubmissionTwoPhase : 0) |
      (options.awaits_norm ? shm::kSubmissionAwaitsNorm : 0));
  submission.grad_scale = options.grad_scale;
  submission.max_norm = options.max_norm;
  OPTSTATE_ASSIGN_OR_RETURN(commit_, Submit(Op::kCommit, submission, deadline));
  return absl::OkStatus();
}

const std::atomic<uint64_t>* ShmChannel::run_stamps() const {
  return has_run_stamps_ ? reinterpret_cast<const std::atomic<uint64_t>*>(
                               run_stamps_.bytes().data())
                         : nullptr;
}

absl::StatusOr<Outcome> ShmChannel::WaitCommit(absl::Time deadline,
                                               Meanwhile meanwhile) {
  if (commit_ == nullptr) {
    return absl::FailedPreconditionError("no commit was started");
  }
  OPTSTATE_RETURN_IF_ERROR(WaitUntil([this] { return commit_->answered; },
                                     deadline, setup_.interrupted, meanwhile));
  Pending* const commit = std::exchange(commit_, nullptr);
  OPTSTATE_RETURN_IF_ERROR(Await(commit, deadline));
  const shm::Completion& from = commit->completion;
  const bool prepared = (from.flags & shm::kCompletionPrepared) != 0;
  return Outcome{
      .step = from.step,
      .applied = (from.flags & shm::kCompletionApplied) != 0,
      .found_inf = (from.flags & shm::kCompletionFoundInf) != 0,
      .gradient_norm = from.gradient_norm,
      .clip_coefficient = from.clip_coefficient,
      .update_ns = prepared ? 0 : from.update_ns,
      .loss_scale = from.loss_scale,
      .good_steps = from.good_steps,
      .hysteresis_left = from.flags >> shm::kCompletionHysteresisShift,
      .durable_step = commit->durable_step,
      .prepared = prepared,
      .digest = prepared ? from.update_ns : 0};
}

absl::Status ShmChannel::Abort(uint64_t step, absl::Time deadline) {
  Submission submission = {};
  submission.step = step;
  return SubmitAndAwait(Op::kAbort, submission, deadline);
}

absl::Status ShmChannel::StartDecision(const StepVerdict& verdict,
                                       absl::Time deadline) {
  Submission submission = {};
  submission.step = verdict.step;
  submission.begin = verdict.digest;
  submission.flags = static_cast<uint16_t>(verdict.verdict);
  if (verdict.verdict == Verdict::kClip) {
    submission.max_norm = verdict.gradient_norm;
    submission.grad_scale = verdict.clip_coefficient;
  }
  OPTSTATE_ASSIGN_OR_RETURN(commit_, Submit(Op::kDecide, submission, deadline));
  return absl::OkStatus();
}

absl::Status ShmChannel::BeginLoad(absl::Time deadline) {
  return SubmitAndAwait(Op::kBeginLoad, {}, deadline);
}

absl::Status ShmChannel::Load(StateArray array, uint32_t parameter,
                              uint64_t begin, DType dtype,
                              absl::Span<const std::byte> data,
                              absl::Time deadline) {
  if (data.size() > shm::kWindowBytes) {
    return absl::InternalError("a load larger than the window");
  }
  std::memcpy(InSegment<std::byte>(segment_layout_.load_window), data.data(),
              data.size());
  const bool counts = IsPerParameter(array);
  Submission submission = {};
  submission.array = static_cast<uint16_t>(array);
  submission.dtype = static_cast<uint16_t>(dtype);
  submission.parameter = parameter;
  submission.begin = begin;
  submission.numel =
      data.size() / (counts ? sizeof(int64_t) : SizeInBytes(dtype));
  return SubmitAndAwait(Op::kLoad, submission, deadline);
}

absl::Status ShmChannel::FinishLoad(const LoadEnd& end, absl::Time deadline) {
  Submission submission = {};
  submission.begin = end.content_digest;
  if (end.begin_at.has_value()) {
    submission.step = end.begin_at->step;
    submission.micro_step = end.begin_at->loads_finished;
  }
  return SubmitAndAwait(Op::kFinishLoad, submission, deadline);
}

// Fetches the ranges one after another, because every answer is at the window's
// start.
absl::StatusOr<uint64_t> ShmChannel::Fetch(absl::Span<const FetchRange> ranges,
                                           absl::Time deadline) {
  uint64_t step = 0;
  for (const FetchRange& range : ranges) {
    OPTSTATE_ASSIGN_OR_RETURN(step, FetchOne(range, deadline));
  }
  return step;
}

absl::Status ShmChannel::HintParameters(ParameterHint hint, uint32_t first,
                                        uint32_t count, absl::Time deadline) {
  Submission submission = {};
  submission.flags = static_cast<uint16_t>(hint);
  submission.parameter = first;
  submission.numel = count;
  return SubmitAndAwait(Op::kParameterHint, submission, deadline);
}

absl::StatusOr<uint64_t> ShmChannel::FetchOne(const FetchRange& range,
                                              absl::Time deadline) {
  if (range.out.size() > shm::kWindowBytes) {
    return absl::InternalError("a fetch larger than the window");
  }
  Submission submission = {};
  submission.array = static_cast<uint16_t>(range.array);
  submission.parameter = range.parameter;
  submission.begin = range.begin;
  submission.numel = range.out.size() / range.element_bytes;
  OPTSTATE_ASSIGN_OR_RETURN(Pending* const pending,
                            Submit(Op::kFetch, submission, deadline));
  OPTSTATE_RETURN_IF_ERROR(Await(pending, deadline));
  // The engine writes to the window again only at our next fetch.
  std::memcpy(range.out.data(),
              InCompletions<std::byte>(CompletionSegmentLayout::kFetchWindow),
              range.out.size());
  return pending->completion.step;
}

}  // namespace optstate::client
