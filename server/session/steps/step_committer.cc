#include "server/session/steps/step_committer.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/steps/commit_content.h"
#include "server/session/steps/loss_scaler.h"
#include "storage/persist_in_order.h"

namespace optstate::session {

storage::StepRecord StepCommitter::NextRecord(
    const StepDecision& decision) const {
  const StepOutcome& outcome = decision.outcome;
  storage::StepRecord next = job_.record();
  next.committed_step = outcome.step;
  next.commit_digest = DigestOf(step_.open_step.commit(0).spec());
  next.gradient_norm = outcome.gradient_norm;
  next.clip_coefficient = outcome.clip_coefficient;
  next.flags = storage::kStepRecordHasOutcome |
               (outcome.applied ? storage::kStepRecordApplied : 0) |
               (outcome.found_inf ? storage::kStepRecordFoundInf : 0);
  next.update_ns = 0;
  next.prepared_digest = 0;
  if (job_.shape->description.loss_scaler.has_value()) {
    AdvanceLossScaler(*job_.shape->description.loss_scaler, outcome.found_inf,
                      &next);
  }
  return next;
}

absl::Status StepCommitter::CommitDecision(const StepDecision& decision,
                                           absl::Span<const uint8_t> updated) {
  const StepOutcome& outcome = decision.outcome;
  const storage::StepRecord next = NextRecord(decision);
  if (!outcome.applied) return SkipStep(next);
  WriteIntent(next, updated);
  MarkStep(outcome.step);
  scheduler::StepScheduler::Update update;
  update.step = outcome.step;
  update.groups = decider_.groups();
  update.gradient_limit = step_.open_step.commit(0).spec().max_value;
  update.updated = updated;
  update.pushed_by = step_.open_step.pushed_by();
  update.gradient_areas = ranks_.gradient_areas();
  return ApplyStep(update, next);
}

storage::StepRecord StepCommitter::PrepareDecision(
    const StepDecision& decision, absl::Span<const uint8_t> updated,
    uint64_t digest, bool awaits_norm) {
  storage::StepRecord next = NextRecord(decision);
  next.prepared_digest = digest;
  if (decision.clipped) next.flags |= storage::kStepRecordClipped;
  if (awaits_norm) next.flags |= storage::kStepRecordAwaitsNorm;
  WriteIntent(next, updated);
  step_.progress.Prepare(next.committed_step);
  return next;
}

// A skipped step changes only the record: its number is used up, so that all
// ranks agree on which step is next.
absl::Status StepCommitter::SkipStep(const storage::StepRecord& next) {
  RecordStep(next);
  ++skipped_steps_;
  return durability_.MakeDurableIfDue(/*is_load=*/false);
}

void StepCommitter::WriteIntent(const storage::StepRecord& next,
                                absl::Span<const uint8_t> updated) {
  // The norm of all nodes that an attempt at the step had which was aborted.
  job_.tier->control()->step_clipped.store(0, std::memory_order_relaxed);
  storage::StepIntentHeader header = {};
  header.record = next;
  // The time is known when the step is recorded.
  header.record.committed_at_ns = 0;
  header.record.crc32c = 0;
  header.gradient_limit = step_.open_step.commit(0).spec().max_value;
  storage::WriteStepIntent(header, decider_.groups(), updated,
                           step_.open_step.pushed_by(),
                           job_.tier->recovery().step_intent);
}

void StepCommitter::NoteClipping(const StepVerdict& verdict) {
  storage::ControlFile& control = *job_.tier->control();
  control.nodes_gradient_norm = verdict.gradient_norm;
  control.nodes_clip_coefficient = verdict.clip_coefficient;
  storage::PersistInOrder(storage::PersistPoint::kStepClipped);
  control.step_clipped.store(verdict.step, std::memory_order_release);
}

// Marks the step before the first tile is touched: an engine that dies from
// here on until the record is published leaves a step that the next one
// finishes as it was decided. The compiler must not move these stores, nor the
// tiles' stores up; the processor's order does not matter, for no other thread
// looks, only a process that comes later.
void StepCommitter::MarkStep(uint64_t step) {
  job_.tier->control()->counts_begun.store(0, std::memory_order_relaxed);
  step_.progress.Mark(step);
  if (job_.options.observer != nullptr) {
    job_.options.observer->OnStepMarked(step);
  }
}

// Does the remaining part of a step that is marked.
absl::Status StepCommitter::ApplyStep(
    const scheduler::StepScheduler::Update& update, storage::StepRecord next) {
  step_.timer.Enter(StepTimer::Phase::kUpdate);
  const auto begin = std::chrono::steady_clock::now();
  const uint64_t waited_before_ns = job_.store->waited_ns();
  const absl::Status applied =
      job_.MakeCountingPass([&] { return job_.scheduler->Apply(update); });
  // Nothing but this pass has waited meanwhile: there is one at a time.
  if (job_.HasDisk()) {
    step_.timer.NoteDiskWait(job_.store->waited_ns() - waited_before_ns);
  }
  if (!applied.ok()) {
    return job_.FailInside(absl::StrCat("step ", update.step), applied);
  }
  const auto elapsed = std::chrono::steady_clock::now() - begin;
  next.update_ns =
      static_cast<uint64_t>(std::chrono::nanoseconds(elapsed).count());
  RecordStep(next);
  return durability_.MakeDurableIfDue(/*is_load=*/false);
}

void StepCommitter::RecordStep(const storage::StepRecord& next) {
  step_.timer.Enter(StepTimer::Phase::kPublish);
  storage::StepRecord record = next;
  // absl::Now() is not used: it repeats reading the clock until a read is
  // quick, which under a stepping debugger is never.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  record.committed_at_ns = std::chrono::nanoseconds(now).count();
  step_.progress.Record(record);
  ranks_.NoteCommittedStep(record.committed_step);
}

}  // namespace optstate::session
