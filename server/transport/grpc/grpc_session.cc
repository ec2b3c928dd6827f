#include "server/transport/grpc/grpc_session.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"
#include "server/session/wire_counters.h"
#include "server/transport/request_name.h"

namespace optstate::transport {
namespace {

absl::Span<const std::byte> AsBytes(const std::string& data) {
  return {reinterpret_cast<const std::byte*>(data.data()), data.size()};
}

absl::Span<std::byte> AsBytes(std::string* data) {
  return {reinterpret_cast<std::byte*>(data->data()), data->size()};
}

v1::SessionReply MakeReply(uint64_t request_id, const absl::Status& status) {
  v1::SessionReply reply;
  reply.set_request_id(request_id);
  *reply.mutable_status() = optstate::ToProto(status);
  return reply;
}

absl::Status NotAttached() {
  return absl::FailedPreconditionError(
      "the session is not attached; register and attach first");
}

absl::Status Unanswered() {
  return absl::FailedPreconditionError(
      "a commit, the end of a micro-step or a finish_load of this session is "
      "not answered yet: wait for that");
}

absl::Status ReadsNothing() {
  return absl::CancelledError("the peer reads no replies any more");
}

}  // namespace

GrpcSession::GrpcSession(session::Job* job, SessionTable* table, Peer peer,
                         const PeerLink* link, ReplyQueue* replies,
                         std::function<void()> interrupt)
    : job_(job),
      handler_({.job = job,
                .table = table,
                .wire = "grpc",
                .transfer_bytes_max = shm::kChunkBytesMax,
                .interrupt = std::move(interrupt),
                .queues =
                    [replies] {
                      return session::WireCounters::QueueLengths{
                          .requests = 0, .replies = replies->length()};
                    }},
               std::move(peer), link),
      replies_(replies) {
  parameters_.CountInto(handler_.traffic().counts());
}

absl::Status GrpcSession::Handle(const v1::SessionRequest& request) {
  if (request.op_case() == v1::SessionRequest::kGradientChunk) {
    return Stage(request.gradient_chunk());
  }
  if (request.request_id() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        RequestName(request), " with request_id 0, which is a notice's"));
  }
  if (!replies_->Reserve()) return ReadsNothing();
  switch (request.op_case()) {
    case v1::SessionRequest::kPush:
      if (request.push().parameter_count() == 0) {
        return StartEndMicroStep(request);
      }
      Reply(Answer(request));
      return absl::OkStatus();
    case v1::SessionRequest::kCommit:
      return StartCommit(request);
    case v1::SessionRequest::kDecide:
      return StartDecide(request);
    case v1::SessionRequest::kFinishLoad:
      return StartFinishLoad(request);
    case v1::SessionRequest::kReadParameters:
      return SendParameters(request.request_id());
    case v1::SessionRequest::kDetach:
      // The rank leaves before the answer, so that it is free when the peer
      // reads that.
      handler_.Leave(request.detach());
      Reply(MakeReply(request.request_id(), absl::OkStatus()));
      return absl::CancelledError("detached by its rank");
    case v1::SessionRequest::OP_NOT_SET:
      return absl::InvalidArgumentError(
          absl::StrCat("request ", request.request_id(),
                       " holds no operation that is known here"));
    default:
      Reply(Answer(request));
      return absl::OkStatus();
  }
}

void GrpcSession::Reply(v1::SessionReply reply) {
  handler_.traffic().CountAnswer(optstate::FromProto(reply.status()));
  replies_->Push(std::move(reply));
}

v1::SessionReply GrpcSession::Answer(const v1::SessionRequest& request) {
  v1::SessionReply reply;
  absl::Status status;
  switch (request.op_case()) {
    case v1::SessionRequest::kRegister: {
      auto result = handler_.Register(request.register_());
      status = result.status();
      if (result.ok()) *reply.mutable_register_() = *std::move(result);
      break;
    }
    case v1::SessionRequest::kAttach: {
      auto result = Attach(request.attach());
      status = result.status();
      if (result.ok()) *reply.mutable_attach() = *std::move(result);
      break;
    }
    case v1::SessionRequest::kPush:
      status = handler_.Push(request.push().step(), request.push().micro_step(),
                             request.push().first_parameter(),
                             request.push().parameter_count());
      break;
    case v1::SessionRequest::kAbort:
      status = handler_.Abort(request.abort().step());
      break;
    case v1::SessionRequest::kPosition: {
      auto position = handler_.Position();
      status = position.status();
      if (position.ok()) *reply.mutable_position() = *std::move(position);
      break;
    }
    case v1::SessionRequest::kBeginLoad:
      status = handler_.BeginLoad();
      break;
    case v1::SessionRequest::kLoad:
      status = Load(request.load());
      break;
    case v1::SessionRequest::kFetch:
      status = Fetch(request.fetch(), reply.mutable_fetch());
      if (!status.ok()) reply.clear_fetch();
      break;
    case v1::SessionRequest::kParameterHint:
      status = handler_.HintParameters(
          static_cast<uint32_t>(request.parameter_hint().kind()),
          request.parameter_hint().first_parameter(),
          request.parameter_hint().parameter_count());
      break;
    case v1::SessionRequest::kShareParameters:
      status = absl::UnimplementedError(
          "share_parameters needs a session over shared memory");
      break;
    case v1::SessionRequest::kShareGradients:
      status = absl::UnimplementedError(
          "share_gradients needs a session over shared memory");
      break;
    default:
      status = absl::InternalError("not a request with one reply");
  }
  reply.set_request_id(request.request_id());
  *reply.mutable_status() = optstate::ToProto(status);
  return reply;
}

absl::StatusOr<v1::AttachReply> GrpcSession::Attach(
    const v1::AttachRequest& request) {
  OPTSTATE_ASSIGN_OR_RETURN(AttachPlan plan, handler_.PlanAttach(request));
  // The claim precedes the file: the rank's previous session removes its own
  // file.
  OPTSTATE_RETURN_IF_ERROR(handler_.Claim(plan));
  absl::StatusOr<v1::AttachReply> attached = AttachClaimed(&plan);
  if (attached.ok()) return attached;
  // A file that was made for this attach would stay until another engine is
  // started, one more for each process that tries, and when the same client
  // tries again its zeros would be taken for gradients. The claim outlasts it:
  // the client may be on another connection already.
  if (staging_.has_value() && !plan.gradients_present) {
    ::unlink(job_->StagingPath(plan.rank, plan.client_instance).c_str());
  }
  staging_.reset();
  handler_.Unclaim();
  return attached;
}

absl::StatusOr<v1::AttachReply> GrpcSession::AttachClaimed(AttachPlan* plan) {
  auto staging =
      job_->MakeStaging(plan->rank, plan->client_instance,
                        plan->gradient_area_bytes, &plan->gradients_present);
  if (!staging.ok()) {
    return Annotate(
        staging.status(),
        absl::StrCat("staging area for the gradients of rank ", plan->rank));
  }
  staging_.emplace(*std::move(staging));
  gradient_area_bytes_ = plan->gradient_area_bytes;
  parameter_area_bytes_ = plan->parameter_area_bytes;
  if (!plan->fetches_parameters) {
    const absl::Status opened = parameters_.Open(
        std::move(plan->parameters), plan->parameter_area_bytes,
        std::move(plan->run_stamps), plan->run_count, std::move(plan->parts));
    if (!opened.ok()) return Annotate(opened, "the job's parameters");
  }
  return handler_.Attach(*plan, staging_->data(), this);
}

absl::Status GrpcSession::Stage(const v1::GradientChunk& chunk) {
  const std::string& data = chunk.data();
  OPTSTATE_ASSIGN_OR_RETURN(std::byte* const staging,
                            StagingFor(chunk.offset_bytes(), data.size()));
  std::memcpy(staging, data.data(), data.size());
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> GrpcSession::StagingFor(uint64_t offset_bytes,
                                                   uint64_t data_bytes) {
  if (!attached()) return Annotate(NotAttached(), "gradient chunk");
  if (data_bytes > shm::kChunkBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient chunk of ", data_bytes, " bytes; at most ",
                     shm::kChunkBytesMax));
  }
  if (offset_bytes > gradient_area_bytes_ ||
      data_bytes > gradient_area_bytes_ - offset_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gradient chunk of ", data_bytes, " bytes at ", offset_bytes,
        " leaves the rank's gradient area of ", gradient_area_bytes_));
  }
  if (pending_.load(std::memory_order_acquire) != 0) {
    return Annotate(Unanswered(), "gradient chunk");
  }
  return staging_->data() + offset_bytes;
}

absl::Status GrpcSession::Load(const v1::LoadRequest& request) {
  uint64_t element_bytes = sizeof(int64_t);
  if (request.array() != v1::STATE_ARRAY_STEP_COUNT &&
      request.array() != v1::STATE_ARRAY_SCALAR &&
      request.array() != v1::STATE_ARRAY_GRADIENT_NORM &&
      request.array() != v1::STATE_ARRAY_PREPARED_SUM) {
    OPTSTATE_ASSIGN_OR_RETURN(const DType dtype,
                              DTypeFromProto(request.dtype()));
    element_bytes = SizeInBytes(dtype);
  }
  if (request.data().size() % element_bytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "load of ", request.data().size(),
        " bytes is no whole number of elements of ", element_bytes, " bytes"));
  }
  return handler_.Load(request.array(), request.parameter(), request.begin(),
                       request.data().size() / element_bytes, request.dtype(),
                       AsBytes(request.data()));
}

absl::Status GrpcSession::Fetch(const v1::FetchRequest& request,
                                v1::FetchReply* reply) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const uint64_t bytes,
      handler_.FetchBytes(request.array(), request.parameter(),
                          request.numel()));
  reply->mutable_data()->resize(bytes);
  OPTSTATE_ASSIGN_OR_RETURN(
      const uint64_t step,
      handler_.Fetch(request.array(), request.parameter(), request.begin(),
                     request.numel(), AsBytes(reply->mutable_data())));
  reply->set_step(step);
  return absl::OkStatus();
}

absl::Status GrpcSession::StartEndMicroStep(const v1::SessionRequest& request) {
  if (!attached()) {
    Reply(MakeReply(request.request_id(), NotAttached()));
    return absl::OkStatus();
  }
  pending_.fetch_add(1, std::memory_order_acq_rel);
  handler_.EndMicroStep(request.request_id(), request.push().step(),
                        request.push().micro_step());
  return absl::OkStatus();
}

absl::Status GrpcSession::StartCommit(const v1::SessionRequest& request) {
  if (!attached()) {
    Reply(MakeReply(request.request_id(), NotAttached()));
    return absl::OkStatus();
  }
  const v1::CommitRequest& commit = request.commit();
  const auto groups = handler_.Groups(commit);
  if (!groups.ok()) {
    Reply(MakeReply(request.request_id(), groups.status()));
    return absl::OkStatus();
  }
  session::CommitSpec spec;
  spec.step = commit.step();
  spec.groups = *groups;
  spec.clips_with = handler_.clips_with();
  spec.grad_scale = commit.grad_scale();
  spec.max_norm = commit.max_norm();
  spec.max_value = commit.max_value();
  spec.norm_type = commit.norm_type() == 0 ? 2 : commit.norm_type();
  spec.found_inf = commit.found_inf();
  spec.two_phase = commit.two_phase();
  spec.awaits_norm = commit.awaits_norm();
  if (commit.wants_parameters() && !spec.two_phase &&
      !handler_.fetches_parameters()) {
    parameters_.Begin(request.request_id(), commit.step());
    replies_->Nudge();
  }
  pending_.fetch_add(1, std::memory_order_acq_rel);
  handler_.Commit(request.request_id(), spec);
  return absl::OkStatus();
}

absl::Status GrpcSession::StartDecide(const v1::SessionRequest& request) {
  if (attached()) {
    pending_.fetch_add(1, std::memory_order_acq_rel);
    handler_.Decide(request.request_id(), VerdictFrom(request.decide()));
    return absl::OkStatus();
  }
  auto outcome = handler_.DecideUnattached(request.decide());
  v1::SessionReply reply = MakeReply(request.request_id(), outcome.status());
  if (outcome.ok()) *reply.mutable_outcome() = *std::move(outcome);
  Reply(std::move(reply));
  return absl::OkStatus();
}

absl::Status GrpcSession::StartFinishLoad(const v1::SessionRequest& request) {
  if (!attached()) {
    Reply(MakeReply(request.request_id(), NotAttached()));
    return absl::OkStatus();
  }
  pending_.fetch_add(1, std::memory_order_acq_rel);
  const v1::FinishLoadRequest& finish = request.finish_load();
  handler_.FinishLoad(
      request.request_id(),
      MakeLoadEnd(finish.content_digest(), finish.begin_at_step(),
                  finish.begin_at_loads()));
  return absl::OkStatus();
}

void GrpcSession::OnStepDone(uint64_t request_id, const absl::Status& status,
                             const session::StepOutcome& outcome) {
  handler_.LogOutcome(status, outcome);
  v1::SessionReply reply = MakeReply(request_id, status);
  if (status.ok()) *reply.mutable_outcome() = ToProto(outcome);
  pending_.fetch_sub(1, std::memory_order_acq_rel);
  Reply(std::move(reply));
}

void GrpcSession::OnNotice(absl::string_view text) {
  if (!handler_.takes_notices()) return;
  v1::SessionReply reply;
  reply.mutable_notice()->set_text(std::string(text));
  replies_->Offer(std::move(reply));
}

absl::Status GrpcSession::SendParameters(uint64_t request_id) {
  absl::Status status = attached() ? absl::OkStatus() : NotAttached();
  if (attached() && handler_.fetches_parameters()) {
    status = absl::FailedPreconditionError(
        "read_parameters of a session that fetches parameters one by one");
  }
  // The parameters would be of two steps.
  if (pending_.load(std::memory_order_acquire) != 0) {
    status = Annotate(Unanswered(), "read_parameters");
  }
  uint64_t offset = 0;
  while (status.ok() && offset < parameter_area_bytes_) {
    const uint64_t bytes =
        std::min<uint64_t>(parameter_area_bytes_ - offset, shm::kChunkBytesMax);
    v1::SessionReply reply = MakeReply(request_id, absl::OkStatus());
    v1::ParameterChunk& chunk = *reply.mutable_parameter_chunk();
    chunk.set_offset_bytes(offset);
    chunk.mutable_data()->resize(bytes);
    status = handler_.ReadParameters(offset, AsBytes(chunk.mutable_data()));
    if (!status.ok()) break;
    if (!replies_->Reserve()) return ReadsNothing();
    Reply(std::move(reply));
    offset += bytes;
  }
  Reply(MakeReply(request_id, status));
  return absl::OkStatus();
}

}  // namespace optstate::transport
