#include "server/transport/shm/ring_server.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"

namespace optstate::transport {

RingServer::RingServer(const ShmSegments* segments, SessionHandler* handler,
                       CompletionWriter* writer, uint64_t group_count,
                       GradientPages* pages)
    : segments_(segments),
      handler_(handler),
      writer_(writer),
      pages_(pages),
      consumer_(segments->engine_ring(), segments->client_ring(),
                segments->submissions()),
      commit_groups_(group_count),
      hyperparams_(group_count),
      clips_with_(group_count) {}

absl::StatusOr<shm::Poll> RingServer::ServeOne() {
  if (writer_->failed()) return writer_->error();
  OPTSTATE_ASSIGN_OR_RETURN(const bool room, writer_->HasRoom(taken_));
  answers_unread_ = !room;
  if (!room) return shm::Poll::kEmpty;
  shm::Submission submission;
  OPTSTATE_ASSIGN_OR_RETURN(const shm::Poll found, consumer_.Take(&submission));
  if (found == shm::Poll::kEmpty) return shm::Poll::kEmpty;
  ++taken_;
  OPTSTATE_RETURN_IF_ERROR(CheckRequestId(submission.request_id));
  OPTSTATE_RETURN_IF_ERROR(Serve(submission));
  consumer_.Release();
  return shm::Poll::kEntry;
}

bool RingServer::WorkAhead() {
  may_work_ahead_ = may_work_ahead_ && handler_->WorkAhead();
  return may_work_ahead_;
}

void RingServer::Wait(absl::Duration spin, absl::Duration sleep) {
  // A peer that reads answers sends no wake-up. It has 1,024 answers to read,
  // so it is not waiting for anything.
  if (answers_unread_) return absl::SleepFor(absl::Milliseconds(1));
  consumer_.Wait(spin, sleep);
}

absl::Status RingServer::CheckRequestId(uint64_t request_id) {
  if (last_request_id_ && request_id != *last_request_id_ + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("submission with request_id ", request_id, " after ",
                     *last_request_id_, "; they grow by one"));
  }
  last_request_id_ = request_id;
  return absl::OkStatus();
}

absl::Status RingServer::Serve(const shm::Submission& submission) {
  switch (static_cast<shm::Op>(submission.op)) {
    case shm::Op::kPush:
      // One push may name any number of parameters, as 0 + numel.
      if (submission.numel > UINT32_MAX) {
        return Answer(submission.request_id,
                      absl::InvalidArgumentError(absl::StrCat(
                          "push of ", submission.numel, " parameters")));
      }
      if (submission.numel == 0) {
        handler_->EndMicroStep(submission.request_id, submission.step,
                               submission.micro_step);
        return absl::OkStatus();
      }
      return Answer(submission.request_id, Push(submission));
    case shm::Op::kCommit:
      return ServeCommit(submission);
    case shm::Op::kAbort:
      return Answer(submission.request_id, handler_->Abort(submission.step));
    case shm::Op::kBeginLoad:
      return Answer(submission.request_id, handler_->BeginLoad());
    case shm::Op::kLoad:
      return ServeLoad(submission);
    case shm::Op::kFinishLoad:
      handler_->FinishLoad(submission.request_id,
                           MakeLoadEnd(submission.begin, submission.step,
                                       submission.micro_step));
      return absl::OkStatus();
    case shm::Op::kFetch:
      return ServeFetch(submission);
    case shm::Op::kDecide:
      handler_->Decide(submission.request_id,
                       {.step = submission.step,
                        .digest = submission.begin,
                        .verdict = VerdictOf(submission.flags),
                        .gradient_norm = submission.max_norm,
                        .clip_coefficient = submission.grad_scale});
      return absl::OkStatus();
    case shm::Op::kParameterHint:
      return Answer(
          submission.request_id,
          handler_->HintParameters(submission.flags, submission.parameter,
                                   submission.numel));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("submission ", submission.request_id, " has op ",
                   submission.op, ", which is not known"));
}

absl::Status RingServer::Push(const shm::Submission& submission) {
  if (pages_ != nullptr) {
    OPTSTATE_RETURN_IF_ERROR(
        pages_->Check(submission.parameter, submission.numel));
  }
  may_work_ahead_ = true;
  return handler_->Push(submission.step, submission.micro_step,
                        submission.parameter,
                        static_cast<uint32_t>(submission.numel));
}

absl::Status RingServer::ServeCommit(const shm::Submission& submission) {
  ReadCommitGroups();
  constexpr int kKnown = shm::kSubmissionFoundInf | shm::kSubmissionTwoPhase |
                         shm::kSubmissionAwaitsNorm;
  if ((submission.flags & ~kKnown) != 0) {
    return Answer(submission.request_id,
                  absl::InvalidArgumentError(
                      absl::StrCat("commit has flags ", submission.flags,
                                   "; only 1 (found_inf), 2 (two_phase) and 4 "
                                   "(awaits_norm) are known")));
  }
  session::CommitSpec spec;
  spec.step = submission.step;
  spec.groups = hyperparams_;
  spec.clips_with = clips_with_;
  spec.grad_scale = submission.grad_scale;
  spec.max_norm = submission.max_norm;
  shm::CommitSettings settings;
  std::memcpy(&settings, segments_->commit_settings(), sizeof(settings));
  spec.max_value = settings.max_value;
  spec.norm_type = settings.norm_type == 0 ? 2 : settings.norm_type;
  spec.found_inf = (submission.flags & shm::kSubmissionFoundInf) != 0;
  spec.two_phase = (submission.flags & shm::kSubmissionTwoPhase) != 0;
  spec.awaits_norm = (submission.flags & shm::kSubmissionAwaitsNorm) != 0;
  may_work_ahead_ = true;
  handler_->Commit(submission.request_id, spec);
  return absl::OkStatus();
}

void RingServer::ReadCommitGroups() {
  std::memcpy(commit_groups_.data(), segments_->commit_groups(),
              commit_groups_.size() * sizeof(shm::CommitGroup));
  for (size_t i = 0; i < commit_groups_.size(); ++i) {
    const shm::CommitGroup& group = commit_groups_[i];
    std::copy(std::begin(group.value), std::end(group.value),
              hyperparams_[i].value.begin());
    hyperparams_[i].max_norm = group.max_norm;
    clips_with_[i] = group.clips_with;
  }
}

absl::Status RingServer::ServeLoad(const shm::Submission& submission) {
  return Answer(submission.request_id,
                handler_->Load(submission.array, submission.parameter,
                               submission.begin, submission.numel,
                               submission.dtype, segments_->load_window()));
}

absl::Status RingServer::ServeFetch(const shm::Submission& submission) {
  const absl::StatusOr<uint64_t> step =
      handler_->Fetch(submission.array, submission.parameter, submission.begin,
                      submission.numel, segments_->fetch_window());
  shm::Completion completion = {};
  completion.request_id = submission.request_id;
  completion.step = step.ok() ? *step : 0;
  return writer_->Write(completion, step.status());
}

absl::Status RingServer::Answer(uint64_t request_id,
                                const absl::Status& status) {
  shm::Completion completion = {};
  completion.request_id = request_id;
  return writer_->Write(completion, status);
}

}  // namespace optstate::transport
