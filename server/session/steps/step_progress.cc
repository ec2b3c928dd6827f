#include "server/session/steps/step_progress.h"

#include "server/session/transition_check.h"
#include "storage/persist_in_order.h"

namespace optstate::session {

// A mark that names the committed step is of a step that is recorded.
StepPhase StepProgress::phase() const {
  if (job_.tier->control()->step_in_progress.load(std::memory_order_relaxed) ==
      next_step()) {
    return StepPhase::kApplying;
  }
  if (closed_.has_value()) return *closed_;
  if (job_.tier->control()->step_prepared.load(std::memory_order_relaxed) ==
      next_step()) {
    return StepPhase::kPrepared;
  }
  return arrived_.any() ? StepPhase::kOpen : StepPhase::kNone;
}

void StepProgress::CheckMayBecome(StepPhase to) const {
  CheckTransition("step", next_step(), phase(), to);
}

void StepProgress::Open() {
  if (phase() == StepPhase::kOpen) return;
  CheckMayBecome(StepPhase::kOpen);
  job_.trace.BeginStep(next_step());
}

void StepProgress::Decide() {
  CheckMayBecome(StepPhase::kDecided);
  closed_ = StepPhase::kDecided;
}

void StepProgress::Prepare(uint64_t step) {
  CheckMayBecome(StepPhase::kPrepared);
  closed_.reset();
  storage::PersistInOrder(storage::PersistPoint::kStepPrepared);
  job_.tier->control()->step_prepared.store(step, std::memory_order_release);
}

void StepProgress::GiveUpPrepared() {
  CheckMayBecome(StepPhase::kNone);
  job_.tier->control()->step_prepared.store(0, std::memory_order_release);
}

void StepProgress::Mark(uint64_t step) {
  CheckMayBecome(StepPhase::kApplying);
  closed_.reset();
  storage::PersistInOrder(storage::PersistPoint::kStepInProgress);
  job_.tier->control()->step_in_progress.store(step, std::memory_order_relaxed);
  storage::PersistInOrder(storage::PersistPoint::kFirstTile);
}

void StepProgress::Record(const storage::StepRecord& record) {
  CheckMayBecome(StepPhase::kRecorded);
  closed_ = StepPhase::kRecorded;
  storage::PublishRecord(record, job_.tier->control());
  if (job_.options.observer != nullptr) {
    job_.options.observer->OnStepRecorded(record.committed_step);
  }
  job_.tier->control()->step_in_progress.store(0, std::memory_order_release);
}

void StepProgress::End() {
  if (!closed_.has_value()) return;
  CheckMayBecome(StepPhase::kNone);
  closed_.reset();
}

}  // namespace optstate::session
