// The session verbs of a step, but for pushes.

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/channel/channel.h"
#include "client/channel/transport_error.h"
#include "client/client.h"
#include "client/session/parameter_reader.h"
#include "client/views/streaming_copy.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// The looks at the engine's run stamps within an update; see AwaitCommit.
constexpr int kLooksPerStep = 64;
constexpr absl::Duration kLookPauseMin = absl::Microseconds(100);
constexpr absl::Duration kLookPauseMax = absl::Milliseconds(2);
// The wait of an interrupted rank for an engine that hangs.
constexpr absl::Duration kFinishPatience = absl::Seconds(5);

// Returns whether the engine may still have what an abort was to drop, because
// no answer came. It would take other gradients for a repeat of those, so the
// next push or commit has to drop them first.
bool MayBeStaged(const absl::Status& aborted) {
  return absl::IsDeadlineExceeded(aborted) || absl::IsUnavailable(aborted) ||
         absl::IsCancelled(aborted);
}

}  // namespace

absl::Status Session::CheckIdle() const {
  OPTSTATE_RETURN_IF_ERROR(CheckUsable());
  if (!commit_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the commit of step ", commit_->step, " is under way: CommitWait first"));
}

absl::Status Session::CheckWhole() const {
  OPTSTATE_RETURN_IF_ERROR(CheckIdle());
  return channel_->CheckParameterArea();
}

absl::Status Session::CheckParameters(uint32_t first, uint32_t count) const {
  const size_t all = setup_->layout.parameters().size();
  if (first <= all && count <= all - first) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "parameters [", first, ", ", uint64_t{first} + count, ") of ", all));
}

void Session::ForgetStaged() {
  std::fill(marks_.begin(), marks_.end(), PieceMark());
  refused_push_ = absl::OkStatus();
  commit_unresolved_ = false;
  push_failed_ = false;
  unended_.reset();
  end_sent_.reset();
}

// Drops the step when no answer came: the engine's state is then unknown, and
// pushing everything again must not meet half of it.
absl::Status Session::NoteFailure(uint64_t step, const absl::Status& status) {
  const bool is_answered =
      !absl::IsDeadlineExceeded(status) && !absl::IsUnavailable(status);
  if (is_answered || step != committed_step_ + 1) return status;
  ForgetStaged();
  push_failed_ = true;
  refused_push_ = status;
  return status;
}

// Drops the whole open step after a refused push: committing the rest would
// silently leave those parameters unchanged.
absl::Status Session::TakeFailedPush() {
  if (!channel_->failed_push()) return absl::OkStatus();
  const Channel::FailedPush failed = *channel_->failed_push();
  channel_->ClearFailedPush();
  absl::Status status =
      Annotate(failed.status, absl::StrCat("push of step ", failed.step));
  if (failed.step == committed_step_ + 1) {
    ForgetStaged();
    refused_push_ = status;
    push_failed_ = MayBeStaged(channel_->Abort(failed.step, StepDeadline()));
  }
  return status;
}

absl::Status Session::Flush() {
  const absl::Status status =
      Persist([&] { return channel_->Flush(StepDeadline()); });
  if (!status.ok())
    return AnnotateWithJob(NoteFailure(committed_step_ + 1, status));
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(TakeFailedPush()));
  if (!accumulates_together()) NoteEnded();
  return absl::OkStatus();
}

// Records that the caller may now write the next micro-step's gradients.
void Session::NoteEnded() {
  if (options_.accumulate) ++ended_;
  unended_.reset();
}

absl::Status Session::EndMicroStep(uint64_t step, uint32_t micro_step) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckWhole()));
  if (!accumulates_together()) return Flush();
  OPTSTATE_RETURN_IF_ERROR(BeginAnew(step));
  begun_step_ = committed_step_ + 1;
  const absl::Status status = Persist([&] {
    if (!end_sent_ || end_sent_->step != step ||
        end_sent_->micro_step != micro_step) {
      // An empty push is answered when the other ranks are as far.
      OPTSTATE_RETURN_IF_ERROR(channel_->Push({.step = step,
                                               .micro_step = micro_step,
                                               .first_parameter = 0,
                                               .parameter_count = 0},
                                              StepDeadline()));
      end_sent_ = {.step = step, .micro_step = micro_step};
    }
    OPTSTATE_RETURN_IF_ERROR(channel_->Flush(StepDeadline()));
    return TakeFailedPush();
  });
  // An interrupted end is still under way; a second call goes on with it.
  if (absl::IsCancelled(status)) return AnnotateWithJob(status);
  end_sent_.reset();
  if (status.ok()) NoteEnded();
  return AnnotateWithJob(status);
}

absl::StatusOr<Outcome> Session::Commit(const CommitOptions& options,
                                        const ParameterTargets& read) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckTargets(read)));
  OPTSTATE_RETURN_IF_ERROR(CommitStart(options));
  return CommitWait(read);
}

absl::Status Session::CheckTargets(const ParameterTargets& read) const {
  if (!read.parameters.empty()) OPTSTATE_RETURN_IF_ERROR(CheckHasParameters());
  if (read.parameters.size() != read.destinations.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(read.parameters.size(), " parameters, ",
                     read.destinations.size(), " destinations"));
  }
  const absl::Span<const ParameterSpec> specs = setup_->layout.parameters();
  for (size_t i = 0; i < read.parameters.size(); ++i) {
    const uint32_t p = read.parameters[i];
    if (p >= specs.size()) return CheckParameters(p, 1);
    if (read.destinations[i] == nullptr && read.ready == nullptr &&
        specs[p].numel != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("the destination of parameter ", p, " is null"));
    }
  }
  return absl::OkStatus();
}

absl::Status Session::ReadParameters(const ParameterTargets& read) {
  if (closed_) return absl::FailedPreconditionError("the session is closed");
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckTargets(read)));
  if (options_.fetches_parameters) return absl::OkStatus();  // of none
  OPTSTATE_RETURN_IF_ERROR(RollBackSpeculation());
  if (channel_->has_mixed_parameters()) {
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
    // A new connection begins with all parameters of one step.
    OPTSTATE_RETURN_IF_ERROR(
        AnnotateWithJob(Persist([] { return absl::OkStatus(); })));
  }
  if (channel_->has_mixed_parameters()) {
    return AnnotateWithJob(absl::FailedPreconditionError(
        "parameters of a step that is not finished yet: take it again first"));
  }
  reader_->Begin(committed_step_, read);
  reader_->CopyRest(channel_->parameter_area().data());
  return CheckParameterArea();
}

// Any fetch has the engine roll back and hold the step; the smallest is of one
// number. Wires that send parameters have areas of their own, which the engine
// does not write.
absl::Status Session::RollBackSpeculation() {
  if (!speculates_ || begun_step_ != committed_step_ + 1) {
    return absl::OkStatus();
  }
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
  if (channel_->parameter_file() < 0) return absl::OkStatus();
  if (channel_->connected() && settled_step_ == begun_step_) {
    return absl::OkStatus();
  }
  int64_t step_count = 0;
  OPTSTATE_RETURN_IF_ERROR(
      Fetch(StateArray::kStepCount, 0,
            absl::MakeSpan(reinterpret_cast<std::byte*>(&step_count),
                           sizeof(step_count)))
          .status());
  settled_step_ = begun_step_;
  return absl::OkStatus();
}

absl::Status Session::CommitStart(const CommitOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckWhole()));
  if (options.groups.size() != setup_->layout.groups().size()) {
    return AnnotateWithJob(absl::InvalidArgumentError(absl::StrCat(
        "commit has hyperparameters of ", options.groups.size(),
        " groups, the layout has ", setup_->layout.groups().size())));
  }
  if (!options.clips_with.empty() &&
      options.clips_with.size() != options.groups.size()) {
    return AnnotateWithJob(absl::InvalidArgumentError(
        absl::StrCat("commit has clips_with of ", options.clips_with.size(),
                     " groups, and ", options.groups.size(), " groups")));
  }
  // The error was reported before; but no push followed, so this is not a new
  // attempt.
  if (!refused_push_.ok() && options.step == committed_step_ + 1) {
    return AnnotateWithJob(std::exchange(refused_push_, absl::OkStatus()));
  }
  if (push_failed_) OPTSTATE_RETURN_IF_ERROR(BeginAnew(options.step));
  commit_ = options;
  commit_sent_ = false;
  begun_step_ = committed_step_ + 1;
  const absl::Status status = Persist([this] { return StartCommit(); });
  if (!status.ok()) DropFailedStep(options.step, status);
  return AnnotateWithJob(status);
}

absl::Status Session::StartCommit() {
  // Every push must have succeeded before the step may be applied.
  OPTSTATE_RETURN_IF_ERROR(channel_->Flush(StepDeadline()));
  OPTSTATE_RETURN_IF_ERROR(TakeFailedPush());
  OPTSTATE_RETURN_IF_ERROR(channel_->StartCommit(*commit_, StepDeadline()));
  commit_sent_ = true;
  return absl::OkStatus();
}

absl::StatusOr<Outcome> Session::CommitWait(const ParameterTargets& read) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckUsable()));
  if (!commit_) {
    return AnnotateWithJob(
        absl::FailedPreconditionError("no commit was started"));
  }
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckTargets(read)));
  const uint64_t step = commit_->step;
  reader_->Begin(step, read);
  Outcome outcome;
  const absl::Status status = Persist([&]() -> absl::Status {
    if (!commit_sent_) OPTSTATE_RETURN_IF_ERROR(StartCommit());
    OPTSTATE_ASSIGN_OR_RETURN(outcome, AwaitCommit());
    return absl::OkStatus();
  });
  if (!status.ok()) {
    DropFailedStep(step, status);
    return AnnotateWithJob(status);
  }
  commit_.reset();
  end_sent_.reset();
  if (outcome.prepared) {
    commit_unresolved_ = false;
    return outcome;
  }
  OPTSTATE_RETURN_IF_ERROR(TakeOutcome(outcome));
  return outcome;
}

absl::Status Session::TakeOutcome(const Outcome& outcome) {
  if (outcome.step > committed_step_) {
    committed_step_ = outcome.step;
    commit_unresolved_ = false;
  }
  loss_scaler_ = {.loss_scale = outcome.loss_scale,
                  .good_steps = outcome.good_steps,
                  .hysteresis_left = outcome.hysteresis_left};
  update_time_ = absl::Nanoseconds(outcome.update_ns);
  if (outcome.applied && !options_.fetches_parameters) {
    reader_->CopyRest(channel_->parameter_area().data());
  }
  return CheckParameterArea();
}

absl::StatusOr<Outcome> Session::Decide(const StepVerdict& verdict) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckWhole()));
  reader_->Begin(verdict.step, {});
  Outcome outcome;
  bool sent = false;
  const auto decide = [&]() -> absl::Status {
    if (!sent || !channel_->has_outstanding_commit()) {
      OPTSTATE_RETURN_IF_ERROR(
          channel_->StartDecision(verdict, StepDeadline()));
      sent = true;
    }
    OPTSTATE_ASSIGN_OR_RETURN(outcome, AwaitCommit());
    return absl::OkStatus();
  };
  absl::Status status = Persist(decide);
  // A decision waits for no other rank, and other nodes may have taken the
  // step: a caller that interrupts the decision gets its end.
  while (absl::IsCancelled(status)) status = Persist(decide);
  if (!status.ok()) return AnnotateWithJob(status);
  if (verdict.verdict == Verdict::kAbort) {
    ForgetStaged();
    return outcome;
  }
  if (!outcome.prepared) OPTSTATE_RETURN_IF_ERROR(TakeOutcome(outcome));
  return outcome;
}

// Checks for ready parts several times during a step as long as the last one;
// the time until the other ranks come is not known.
absl::StatusOr<Outcome> Session::AwaitCommit() {
  const absl::Duration pause =
      std::clamp(update_time_ / kLooksPerStep, kLookPauseMin, kLookPauseMax);
  const auto look = [&] {
    const std::atomic<uint64_t>* const stamps = channel_->run_stamps();
    if (stamps == nullptr || reader_->done()) return absl::InfiniteDuration();
    const bool copied =
        reader_->CopyReady(stamps, channel_->parameter_area().data());
    return copied ? absl::ZeroDuration() : pause;
  };
  absl::StatusOr<Outcome> outcome = channel_->WaitCommit(StepDeadline(), look);
  // The caller that interrupts a wait may go on with parameters of one step,
  // not of two: when some are new, all of them are awaited.
  const absl::Time patience = absl::Now() + kFinishPatience;
  const auto has_begun = [&] {
    // A single rank waits only for the engine.
    return reader_->has_copied() || channel_->has_mixed_parameters() ||
           (has_views_ && (setup_->world_size == 1 || WritesParameters()));
  };
  while (absl::IsCancelled(outcome.status()) && has_begun() &&
         absl::Now() < patience) {
    outcome = channel_->WaitCommit(StepDeadline(), look);
  }
  return outcome;
}

// Drops a refused step: whether the engine kept its gradients depends on the
// reason, and after this call it has not. A step whose answer did not come may
// be committed again. An interrupted commit goes on.
void Session::DropFailedStep(uint64_t step, const absl::Status& status) {
  if (absl::IsCancelled(status)) return;
  commit_.reset();
  if (step != committed_step_ + 1) return;
  commit_unresolved_ =
      absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status);
  if (commit_unresolved_) return;
  ForgetStaged();
  channel_->ClearFailedPush();
  if (!channel_->connected()) return;
  push_failed_ = MayBeStaged(channel_->Abort(step, StepDeadline()));
}

absl::Status Session::Abort(uint64_t step) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
  if (step == committed_step_ + 1) ForgetStaged();
  loading_ = false;
  const absl::Status aborted = Persist([&] {
    absl::Status status = channel_->Abort(step, StepDeadline());
    // The abort is answered after every push before it.
    if (channel_->failed_push() && channel_->failed_push()->step == step) {
      channel_->ClearFailedPush();
    }
    if (status.ok()) begun_step_ = 0;
    return status;
  });
  if (step == committed_step_ + 1) push_failed_ = MayBeStaged(aborted);
  return AnnotateWithJob(aborted);
}

}  // namespace optstate::client
