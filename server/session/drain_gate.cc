#include "server/session/drain_gate.h"

#include "absl/strings/str_cat.h"

namespace optstate::session {

// A step begun by ranks that are to return also counts as open, unless the job
// has failed: it then takes no step.
bool DrainGate::IsDrained() const {
  return draining_ && job_.lock.is_idle() && NoOpenStep() &&
         (!job_.failure.ok() || ranks_.AwaitedCount() == 0 ||
          !ranks_.WasBegun(job_.record().committed_step + 1));
}

// Staged gradients of a former engine's ranks open no step while those ranks
// are away.
bool DrainGate::NoOpenStep() const {
  if (!job_.failure.ok()) return true;
  if (job_.recovery.has_value()) return false;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_.state(rank) == RankState::kAttached &&
        step_.open_step.opened_by(rank)) {
      return false;
    }
  }
  return true;
}

bool DrainGate::NothingUnderWay() const {
  // A prepared step is written down, and the next engine keeps it.
  const bool is_kept =
      job_.recovery.has_value() && job_.recovery->awaits_verdict;
  return job_.lock.is_idle() && (is_kept || NoOpenStep()) &&
         !load_.round.active();
}

absl::Status DrainGate::AwaitDrained(absl::Time deadline) {
  if (job_.lock.mu.AwaitWithDeadline(
          absl::Condition(this, &DrainGate::IsDrained), deadline)) {
    return absl::OkStatus();
  }
  if (!draining_) {
    return absl::DeadlineExceededError(absl::StrCat(
        "job \"", job_.options.name,
        "\" does not drain: it was told to take steps again, or its engine was "
        "not told to drain in time"));
  }
  // A step is open, so there is a layout and with it a record.
  return absl::DeadlineExceededError(absl::StrCat(
      "job \"", job_.options.name, "\", step ",
      job_.record().committed_step + 1, ": ", step_.open_step.Describe()));
}

void DrainGate::Resume() {
  draining_ = false;
  paused_ = false;
}

absl::Status DrainGate::AwaitResumed(absl::Time deadline) {
  const auto resumed = [this]() { return !draining_; };
  if (job_.lock.mu.AwaitWithDeadline(absl::Condition(&resumed), deadline)) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(
      absl::StrCat("job \"", job_.options.name, "\" was told to drain again"));
}

absl::Status DrainGate::Pause(absl::Time deadline, absl::Duration lease) {
  if (!job_.lock.mu.AwaitWithDeadline(
          absl::Condition(this, &DrainGate::NothingUnderWay), deadline)) {
    return absl::DeadlineExceededError(absl::StrCat(
        "job \"", job_.options.name,
        "\" was never without a step, a load or a recovery under way"));
  }
  paused_ = true;
  pause_end_ = job_.options.clock() + lease;
  return absl::OkStatus();
}

bool DrainGate::paused() const {
  return paused_ && job_.options.clock() < pause_end_;
}

absl::Status DrainGate::CheckTakesOperations() const {
  if (!draining_ && IsAwake()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", job_.options.name, "\" ",
                   draining_ ? "drains (until `optctl drain --resume`)"
                             : "pauses for the end of its engine; try again"));
}

void DrainGate::Stop() {
  paused_ = true;
  pause_end_ = absl::InfiniteFuture();
}

void DrainGate::AwaitPauseEnd() {
  // Another call of Pause makes the pause longer, and a call that was woken
  // before this one may be making a pass.
  while (!IsAwake() || !job_.lock.is_idle()) {
    if (IsAwake()) {
      job_.lock.AwaitIdle();
      continue;
    }
    if (job_.options.observer != nullptr)
      job_.options.observer->OnAwaitPauseEnd();
    job_.lock.mu.AwaitWithDeadline(absl::Condition(this, &DrainGate::IsAwake),
                                   pause_end_);
  }
  paused_ = false;
}

}  // namespace optstate::session
