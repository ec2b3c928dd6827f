#include "server/session/steps/step_preparer.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/session/job_facts.h"
#include "server/session/steps/commit_content.h"
#include "server/session/steps/loss_scaler.h"
#include "spdlog/spdlog.h"

namespace optstate::session {
namespace {

std::string Hex(uint64_t digest) {
  return absl::StrCat(absl::Hex(digest, absl::kZeroPad16));
}

bool IsApplied(const storage::StepRecord& record) {
  return (record.flags & storage::kStepRecordApplied) != 0;
}

// Returns the digest of the step for which a verdict was carried out.
uint64_t DigestAfter(const StepVerdict& verdict) {
  if (verdict.verdict != Verdict::kClip) return verdict.digest;
  return ClippedDigest(verdict.digest, verdict.gradient_norm,
                       verdict.clip_coefficient);
}

// Returns whether a verdict takes the step.
bool Takes(const StepVerdict& verdict) {
  return verdict.verdict == Verdict::kCommit ||
         verdict.verdict == Verdict::kSkip;
}

absl::Status CheckKnown(const StepVerdict& verdict) {
  switch (verdict.verdict) {
    case Verdict::kCommit:
    case Verdict::kSkip:
    case Verdict::kAbort:
      return absl::OkStatus();
    case Verdict::kClip:
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("verdict ", static_cast<int>(verdict.verdict),
                       " is not known; 1 commit, 2 skip, 3 abort, 5 clip"));
  }
  const double norm = verdict.gradient_norm;
  const double coefficient = verdict.clip_coefficient;
  if (std::isfinite(norm) && norm >= 0 && coefficient > 0 && coefficient <= 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "step ", verdict.step, " is to be clipped by gradient_norm ", norm,
      " and clip_coefficient ", coefficient,
      "; the norm is finite and not negative, the coefficient in (0, 1]"));
}

}  // namespace

absl::Status StepPreparer::CheckCanPrepare() const {
  if (job_.speculates()) {
    return absl::UnimplementedError(
        "a speculative job begins steps before all nodes have decided about "
        "them: leave speculative out on several nodes");
  }
  if (job_.accumulates_together()) {
    return absl::UnimplementedError(
        "a job whose daemon sums the ranks' micro-steps takes no step of "
        "several nodes: use reduction=\"trainer\"");
  }
  return absl::OkStatus();
}

void StepPreparer::Prepare(const StepDecision& decision,
                           absl::Span<const uint8_t> updated) {
  const CommitSpec& commit = step_.open_step.commit(0).spec();
  const uint64_t digest =
      PreparedDigest(commit, job_.layout().hash(), job_.record().loads_finished,
                     decider_.gradient_norms());
  const storage::StepRecord record =
      committer_.PrepareDecision(decision, updated, digest, commit.awaits_norm);
  recovery_.KeepPrepared(record, decider_.groups(), commit.max_value, updated,
                         step_.open_step.pushed_by());
}

StepOutcome StepPreparer::PreparedOutcome() const {
  StepOutcome outcome = OutcomeOf(job_.recovery->record);
  outcome.prepared = true;
  return outcome;
}

StepOutcome StepPreparer::OutcomeAfter(const StepVerdict& verdict) const {
  if (verdict.verdict == Verdict::kAbort) return StepOutcome{};
  if (job_.recovery.has_value() && job_.recovery->awaits_verdict) {
    return PreparedOutcome();
  }
  return job_.LastOutcome();
}

absl::Status StepPreparer::CheckIsDecidedSo(
    const StepVerdict& verdict, const storage::StepRecord& record) const {
  if (DigestAfter(verdict) != record.prepared_digest) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", verdict.step, " of job \"", job_.options.name,
        "\" was committed here as ",
        record.prepared_digest == 0 ? std::string("a step of one node")
                                    : Hex(record.prepared_digest),
        ", the decision is about ", Hex(DigestAfter(verdict))));
  }
  if (verdict.verdict == Verdict::kAbort ||
      (verdict.verdict == Verdict::kSkip && IsApplied(record))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", verdict.step, " of job \"", job_.options.name, "\" was ",
        IsApplied(record) ? "applied" : "skipped", " here, the decision is to ",
        verdict.verdict == Verdict::kAbort ? "abort" : "skip", " it"));
  }
  return absl::OkStatus();
}

// A step that this node has clipped by its own norms cannot be clipped anew:
// what it clipped by groups is not known.
absl::Status StepPreparer::CheckCanClip(const RecoveredStep& prepared) const {
  const storage::StepRecord& record = prepared.record;
  if (!IsApplied(record)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", record.committed_step, " of job \"", job_.options.name,
        "\" has Inf or NaN here: nodes can only skip or abort it"));
  }
  if (!prepared.is_clipped_here) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "step ", record.committed_step, " of job \"", job_.options.name,
      "\" was prepared with a max_norm, by which this node has clipped its own "
      "gradients: commit without one where nodes have different parameters"));
}

// Ranks that are started without those of the other nodes or jobs may not know
// that there are any.
absl::Status StepPreparer::CheckCanCommit(const RecoveredStep& prepared) const {
  if (!prepared.awaits_norm || prepared.is_clipped_together ||
      !IsApplied(prepared.record)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "step ", prepared.record.committed_step, " of job \"", job_.options.name,
      "\" was prepared to be clipped by the norm of several nodes or jobs, "
      "which is not noted: bring the norm first, or abort the step and take it "
      "again"));
}

absl::StatusOr<StepPreparer::Due> StepPreparer::CheckVerdict(
    const StepVerdict& verdict) const {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  OPTSTATE_RETURN_IF_ERROR(CheckKnown(verdict));
  const uint64_t committed = job_.record().committed_step;
  if (verdict.step == committed && committed != 0) {
    OPTSTATE_RETURN_IF_ERROR(CheckIsDecidedSo(verdict, job_.record()));
    return Due::kNothing;
  }
  if (!job_.recovery.has_value() ||
      verdict.step != job_.recovery->record.committed_step) {
    // An abort may come to a node that never prepared the step, or again.
    if (verdict.verdict == Verdict::kAbort && verdict.step == committed + 1) {
      return Due::kNothing;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", verdict.step, " of job \"", job_.options.name,
        "\" is not prepared here, which has committed step ", committed));
  }
  const storage::StepRecord& record = job_.recovery->record;
  if (!job_.recovery->awaits_verdict) {
    OPTSTATE_RETURN_IF_ERROR(CheckIsDecidedSo(verdict, record));
    return Due::kFinish;
  }
  const bool clips = verdict.verdict == Verdict::kClip;
  const bool is_clipped = job_.recovery->is_clipped_together;
  if (clips && is_clipped && DigestAfter(verdict) == record.prepared_digest) {
    return Due::kNothing;
  }
  if (verdict.digest != record.prepared_digest || (clips && is_clipped)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", verdict.step, " of job \"", job_.options.name,
        "\" is prepared here as ", Hex(record.prepared_digest),
        ", the decision is about ", Hex(verdict.digest),
        is_clipped ? ": it has the norm of all nodes already"
                   : ": nodes have other gradients, settings or loads"));
  }
  if (clips) OPTSTATE_RETURN_IF_ERROR(CheckCanClip(*job_.recovery));
  if (verdict.verdict == Verdict::kCommit) {
    OPTSTATE_RETURN_IF_ERROR(CheckCanCommit(*job_.recovery));
  }
  return Due::kDecide;
}

void StepPreparer::Take(const StepVerdict& verdict) {
  if (verdict.verdict == Verdict::kAbort) {
    observe::LogRepeated(spdlog::level::info, "prepared step aborted",
                         absl::StrCat("job ", job_.options.name),
                         "prepared step aborted: job={} step={}",
                         job_.options.name, verdict.step);
    return recovery_.DropPrepared();
  }
  if (verdict.verdict == Verdict::kClip) {
    committer_.NoteClipping(verdict);
    return job_.recovery->Clip(verdict.gradient_norm, verdict.clip_coefficient);
  }
  storage::StepRecord& record = job_.recovery->record;
  if (verdict.verdict == Verdict::kSkip && IsApplied(record)) {
    record.flags =
        storage::kStepRecordHasOutcome | storage::kStepRecordFoundInf;
    record.clip_coefficient = 1;
    const storage::StepRecord& now = job_.record();
    record.loss_scale = now.loss_scale;
    record.good_steps = now.good_steps;
    record.hysteresis_left = now.hysteresis_left;
    if (job_.shape->description.loss_scaler.has_value()) {
      AdvanceLossScaler(*job_.shape->description.loss_scaler,
                        /*found_inf=*/true, &record);
    }
  }
  if (IsApplied(record)) committer_.MarkStep(record.committed_step);
  job_.recovery->awaits_verdict = false;
}

void StepPreparer::Decide(uint32_t rank, uint64_t request_id,
                          const StepVerdict& verdict) {
  // No rank to answer: the session ended while this was under way.
  if (!ranks_.CheckAttached(rank).ok()) return;
  const absl::StatusOr<Due> due = CheckVerdict(verdict);
  if (!due.ok()) {
    return ranks_.Answer(rank, request_id, due.status(), StepOutcome{});
  }
  if (*due == Due::kDecide) Take(verdict);
  if (*due == Due::kNothing || (*due == Due::kDecide && !Takes(verdict))) {
    return ranks_.Answer(rank, request_id, absl::OkStatus(),
                         OutcomeAfter(verdict));
  }
  // The rank waits for the step as one does that has committed it.
  CommitSpec waits;
  waits.step = verdict.step;
  step_.open_step.NoteCommit(rank, request_id, waits);
  recovery_.FinishStepIfPossible();
}

absl::StatusOr<StepOutcome> StepPreparer::DecideUnattached(
    const StepVerdict& verdict) {
  OPTSTATE_ASSIGN_OR_RETURN(const Due due, CheckVerdict(verdict));
  if (due == Due::kDecide) {
    // Another verdict than theirs would part the nodes.
    if (ranks_.AttachedCount() > 0) {
      return absl::UnavailableError(absl::StrCat(
          "ranks are attached to job \"", job_.options.name,
          "\", and decide step ", verdict.step, " themselves: end them first"));
    }
    Take(verdict);
  }
  if (due == Due::kNothing || (due == Due::kDecide && !Takes(verdict))) {
    return OutcomeAfter(verdict);
  }
  recovery_.FinishStepIfPossible();
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  if (job_.recovery.has_value()) return job_.StillRecovering();
  return job_.LastOutcome();
}

absl::StatusOr<JobPosition> StepPreparer::Position() const {
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  JobPosition position;
  if (job_.shape == nullptr) return position;  // as if there were no job
  if (job_.recovery.has_value() && !job_.recovery->awaits_verdict) {
    return job_.StillRecovering();
  }
  const storage::StepRecord& record = job_.record();
  position.committed_step = record.committed_step;
  position.phase = job_.phase();
  position.loads_finished = record.loads_finished;
  if (job_.store != nullptr) position.durable_step = job_.store->durable_step();
  if ((record.flags & storage::kStepRecordHasOutcome) != 0) {
    position.last_outcome = job_.LastOutcome();
  }
  if (job_.recovery.has_value()) {
    position.prepared = PreparedOutcome();
    position.prepared_is_clipped = job_.recovery->is_clipped_together;
    position.prepared_awaits_norm = job_.recovery->awaits_norm;
  }
  return position;
}

}  // namespace optstate::session
