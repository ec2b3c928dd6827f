#include "server/session/steps/step_coordinator.h"

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/durability/job_storage.h"
#include "server/session/steps/commit_content.h"

namespace optstate::session {

absl::Status StepCoordinator::CheckStep(uint32_t rank, uint64_t step) const {
  OPTSTATE_RETURN_IF_ERROR(ranks_.CheckAttached(rank));
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  if (job_.recovery.has_value()) return job_.StillRecovering();
  if (job_.phase() != v1::JOB_PHASE_READY) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", job_.options.name,
        "\" is loading: every rank must load and finish before a step"));
  }
  if (load_.round.begun(rank)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank,
        " has begun a load: it must finish it, or abort the step, before"));
  }
  OPTSTATE_RETURN_IF_ERROR(sums_.CheckSums(rank));
  const uint64_t next = job_.record().committed_step + 1;
  if (step != next) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", step, " is out of order: job \"", job_.options.name,
        "\" has committed step ", next - 1, ", the next is ", next));
  }
  if (gate_.draining() && step_.progress.phase() == StepPhase::kNone &&
      !ranks_.WasBegun(next)) {
    return absl::UnavailableError(absl::StrCat(
        "job \"", job_.options.name, "\" is draining and opens no new step"));
  }
  return absl::OkStatus();
}

// Returns whether a push or commit is a repeat: the step was decided with what
// this rank had pushed. The rank attached before the step was finished, which
// another rank can have caused by now.
bool StepCoordinator::IsOfRecoveredStep(uint32_t rank, uint64_t step) const {
  if (step == 0 || !ranks_.CheckAttached(rank).ok()) return false;
  if (step != ranks_.session(rank).recovering_step) return false;
  return job_.recovery.has_value() || step == job_.record().committed_step;
}

absl::Status StepCoordinator::Push(uint32_t rank, uint64_t step,
                                   uint32_t micro_step,
                                   uint32_t first_parameter,
                                   uint32_t parameter_count) {
  gate_.AwaitPauseEnd();
  losses_.NoteAcknowledged(rank);
  if (IsOfRecoveredStep(rank, step)) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(CheckStep(rank, step));
  OPTSTATE_RETURN_IF_ERROR(
      job_.CheckParameterRange(first_parameter, parameter_count));
  if (step_.open_step.commit(rank).committed) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " has committed step ", step,
                     " and cannot push to it; abort it to start over"));
  }
  return stager_.Stage(rank, step, micro_step, first_parameter,
                       first_parameter + parameter_count);
}

bool StepCoordinator::WorkAhead(uint32_t rank) {
  if (!ranks_.CheckAttached(rank).ok() || !job_.failure.ok() ||
      job_.recovery.has_value() || job_.phase() != v1::JOB_PHASE_READY ||
      load_.round.active() || gate_.paused()) {
    return false;
  }
  return speculator_.SpeculateOnPushed() || CatchUp();
}

bool StepCoordinator::CatchUp() {
  if (DeviceBudgetOf(job_.shape->description.storage) == 0) return false;
  bool is_more = false;
  job_.MakePass([&] {
        is_more = job_.scheduler->WorkAhead();
        return absl::OkStatus();
      })
      .IgnoreError();  // always OK: MakePass returns what the pass does
  return is_more;
}

absl::Status StepCoordinator::CheckEnding(uint32_t rank, uint64_t step) const {
  OPTSTATE_RETURN_IF_ERROR(CheckStep(rank, step));
  if (step_.open_step.commit(rank).committed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has committed step ", step,
        " and cannot end a micro-step of it; abort it to start over"));
  }
  if (ranks_.session(rank).ending.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " waits for the end of a micro-step of ", "step ", step,
        " already (request ", *ranks_.session(rank).ending, ")"));
  }
  return absl::OkStatus();
}

void StepCoordinator::EndMicroStep(uint32_t rank, uint64_t request_id,
                                   uint64_t step, uint32_t micro_step) {
  gate_.AwaitPauseEnd();
  losses_.NoteAcknowledged(rank);
  // No rank to answer: the session ended while this was under way.
  if (!ranks_.CheckAttached(rank).ok()) return;
  absl::Status status;
  const bool repeated = IsOfRecoveredStep(rank, step);
  if (!repeated) status = CheckEnding(rank, step);
  // Otherwise the rank does not wait for others.
  if (!repeated && status.ok() && job_.accumulates_together()) {
    status = agreement_.AgreeToStep(rank, "has ended a micro-step of");
  }
  if (repeated || !status.ok() || !job_.accumulates_together()) {
    ranks_.Answer(rank, request_id, status, StepOutcome{});
    return;
  }
  marks_.BeginStaging(rank, step, micro_step);
  ranks_.session(rank).ending = request_id;
  sums_.NotePast(rank, int64_t{micro_step} + 1);
  sums_.SumCompletedMicroSteps(0, 0);
  if (sums_.IsWaiting(rank)) losses_.NotifyExistingLosses(rank);
}

absl::Status StepCoordinator::CheckCommit(uint32_t rank, const CommitSpec& spec,
                                          bool* repeated) const {
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  OPTSTATE_RETURN_IF_ERROR(CheckContent(spec, job_.layout().optimizer(),
                                        job_.layout().groups().size()));
  if (job_.recovery.has_value() &&
      spec.step == job_.recovery->record.committed_step &&
      DigestOf(spec) == job_.recovery->record.commit_digest &&
      !step_.open_step.commit(rank).committed) {
    return absl::OkStatus();  // answered when the step is finished
  }
  *repeated = spec.step == job_.record().committed_step &&
              (job_.record().flags & storage::kStepRecordHasOutcome) != 0;
  if (*repeated) {
    if (DigestOf(spec) == job_.record().commit_digest) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", spec.step,
        " is committed already, with other hyperparameters, grad_scale or "
        "max_norm"));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckStep(rank, spec.step));
  if (spec.two_phase) OPTSTATE_RETURN_IF_ERROR(preparer_.CheckCanPrepare());
  if (step_.open_step.commit(rank).committed) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " has committed step ", spec.step,
                     " already and waits for the others (request ",
                     step_.open_step.commit(rank).request_id, ")"));
  }
  return absl::OkStatus();
}

void StepCoordinator::Commit(uint32_t rank, uint64_t request_id,
                             const CommitSpec& spec) {
  gate_.AwaitPauseEnd();
  // No rank to answer: the session ended while this was under way.
  if (!ranks_.CheckAttached(rank).ok()) return;
  losses_.NoteAcknowledged(rank);
  bool repeated = false;
  absl::Status checked = CheckCommit(rank, spec, &repeated);
  if (checked.ok() && !repeated && !job_.recovery.has_value()) {
    checked = agreement_.AgreeToStep(rank, "has committed");
  }
  if (!checked.ok() || repeated) {
    ranks_.Answer(rank, request_id, checked,
                  checked.ok() ? job_.LastOutcome() : StepOutcome{});
    return;
  }
  // A repeat: the rank lost its connection before the step was prepared.
  if (job_.recovery.has_value() && job_.recovery->awaits_verdict) {
    return ranks_.Answer(rank, request_id, absl::OkStatus(),
                         preparer_.PreparedOutcome());
  }
  if (!job_.recovery.has_value()) step_.progress.Open();
  step_.open_step.NoteCommit(rank, request_id, spec);
  // Done also for a rank that has pushed nothing: the next engine knows of the
  // step.
  if (!job_.recovery.has_value()) marks_.BeginStaging(rank, spec.step, 0);
  if (job_.accumulates_together()) sums_.NotePast(rank, MicroSteps::kAll);
  step_.timer.Enter(StepTimer::Phase::kWaiting);
  if (job_.recovery.has_value()) {
    // The rank's earlier pushes have arrived by now, over every wire.
    if (ranks_.gradient_area(rank) == nullptr) {
      ranks_.gradient_area(rank) = ranks_.session(rank).spec.gradient_area;
    }
    recovery_.FinishStepIfPossible();
  } else if (step_.open_step.all_committed()) {
    CloseStep();
  } else {
    losses_.NotifyExistingLosses(rank);
    if (sums_.IsWaiting(rank)) speculator_.Speculate(rank);
  }
}

// Decides the step, and takes or prepares it.
absl::Status StepCoordinator::TakeStep(StepOutcome* outcome,
                                       absl::Span<const uint8_t>* updated) {
  OPTSTATE_RETURN_IF_ERROR(CheckCommitsEqual());
  OPTSTATE_RETURN_IF_ERROR(stager_.ResolveParameters(updated));
  stager_.StagePartial();
  const CommitSpec& commit = step_.open_step.commit(0).spec();
  const StepDecision decision =
      decider_.Decide(job_.record().committed_step + 1, *updated);
  step_.progress.Decide();
  absl::Status status = speculator_.PrepareForDecision(decision, commit);
  decider_.KeepGradientNorms(decision.outcome.step, *updated);
  if (status.ok() && commit.two_phase) {
    preparer_.Prepare(decision, *updated);
    *outcome = preparer_.PreparedOutcome();
    return absl::OkStatus();
  }
  if (status.ok()) status = committer_.CommitDecision(decision, *updated);
  *outcome = job_.LastOutcome();
  return status;
}

// Takes or prepares the step, or refuses it to all, once all ranks have
// committed.
void StepCoordinator::CloseStep() {
  step_.timer.Enter(StepTimer::Phase::kDecide);
  absl::Span<const uint8_t> updated;
  StepOutcome outcome;
  const absl::Status status = TakeStep(&outcome, &updated);
  sums_.AnswerCommits(status, outcome);
  if (status.ok() && outcome.prepared) {
    // The recovery has all that its end needs. Sums and marks of it stay.
    step_.open_step.DropAll();
    step_.timer.Enter(StepTimer::Phase::kWaiting);
    return;
  }
  if (status.ok()) {
    step_.timer.Finish(outcome.applied ? job_.scheduler->UpdateBytes(updated)
                                       : 0);
  }
  if (job_.accumulates_together())
    sums_.ForgetSums();  // every rank has been answered
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank)
    stager_.DropStaged(rank);
  step_.progress.End();
}

absl::Status StepCoordinator::CheckCommitsEqual() const {
  for (uint32_t rank = 1; rank < ranks_.size(); ++rank) {
    OPTSTATE_RETURN_IF_ERROR(CheckEqual(job_.layout().optimizer(), 0,
                                        step_.open_step.commit(0).spec(), rank,
                                        step_.open_step.commit(rank).spec()));
  }
  return absl::OkStatus();
}

absl::Status StepCoordinator::Abort(uint32_t rank, uint64_t step) {
  losses_.NoteAcknowledged(rank);
  OPTSTATE_RETURN_IF_ERROR(ranks_.CheckAttached(rank));
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  if (job_.recovery.has_value()) return job_.StillRecovering();
  const uint64_t next = job_.record().committed_step + 1;
  if (step != next) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", step, " cannot be aborted: job \"",
                     job_.options.name, "\" has committed step ", next - 1));
  }
  if (load_.round.finished(rank)) {
    ranks_.Answer(
        rank, load_.round.request_id(rank),
        absl::AbortedError(absl::StrCat("rank ", rank, " aborted its load")),
        StepOutcome{});
  }
  rounds_.Leave(rank, "has aborted its load");
  const OpenStep::RankCommit& commit = step_.open_step.commit(rank);
  const bool committed = commit.committed;
  const uint64_t request_id = commit.request_id;
  sums_.NoteDropAcknowledged(rank);
  stager_.DropStaged(rank);
  // A speculation that could not be rolled back was the answer.
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  if (committed) {
    ranks_.Answer(
        rank, request_id,
        absl::AbortedError(absl::StrCat("rank ", rank, " aborted step ", step)),
        StepOutcome{});
  }
  return absl::OkStatus();
}

}  // namespace optstate::session
