// Tracks which ranks are attached, and when a job rests.

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/control/process_stat.h"
#include "server/session/job_impl.h"

namespace optstate {

absl::Status JobImpl::CheckAttached(uint32_t rank) const {
  if (rank < ranks_.size() && ranks_[rank].attached) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", rank, " is not attached to job \"", options_.name, "\""));
}

uint32_t JobImpl::AttachedCount() const {
  return static_cast<uint32_t>(
      std::count_if(ranks_.begin(), ranks_.end(),
                    [](const RankSession& rank) { return rank.attached; }));
}

bool JobImpl::IsAwaited(uint32_t rank) const {
  return !ranks_[rank].attached && rank_mark(rank).attached != 0;
}

uint32_t JobImpl::AwaitedCount() const {
  uint32_t count = 0;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (IsAwaited(rank)) ++count;
  }
  return count;
}

// Between two steps a rank is not held: nothing is lost when another session
// takes its place, and a process that closed its session unheard blocks no
// other.
bool JobImpl::IsHeld(uint32_t rank, const RankProcess& by) const {
  const RankMark& mark = rank_mark(rank);
  return IsAwaited(rank) && mark.pid != 0 && mark.pid != by.pid &&
         (recovery_.has_value() || WasBegun(record().committed_step + 1)) &&
         control::IsRunning(mark.pid, mark.process_start_ticks);
}

absl::Status JobImpl::HeldBy(uint32_t rank) const {
  return absl::AlreadyExistsError(
      absl::StrCat("rank ", rank, " of job \"", options_.name, "\" is process ",
                   rank_mark(rank).pid, ", which lost its engine within step ",
                   record().committed_step + 1,
                   ", runs, and comes back by itself: end it first"));
}

absl::Status JobImpl::CheckNoneHeld(const RankProcess& by) const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (IsHeld(rank, by)) return HeldBy(rank);
  }
  return absl::OkStatus();
}

std::vector<FormerRank> JobImpl::Awaited() const {
  absl::MutexLock lock(&mu_);
  std::vector<FormerRank> awaited;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!IsAwaited(rank)) continue;
    const RankMark& mark = rank_mark(rank);
    awaited.push_back({.rank = rank,
                       .client_instance = mark.client_instance,
                       .process = {.pid = mark.pid,
                                   .start_ticks = mark.process_start_ticks}});
  }
  return awaited;
}

absl::Status JobImpl::CheckMayAttach(const AttachSpec& spec) const {
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(failure_);
  if (spec.rank >= ranks_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", spec.rank, " of a world of ", ranks_.size()));
  }
  if (spec.comes_back && !WasAttachedLast(spec)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", spec.rank, " of job \"", options_.name,
        "\" was another session's since this one lost its connection, or the "
        "job was made anew: open a new session"));
  }
  if (draining_ && !WasAttachedLast(spec)) {
    return absl::UnavailableError(absl::StrCat(
        "job \"", options_.name, "\" is draining and takes no new sessions"));
  }
  if (spec.layout_hash != layout_of_job().hash()) {
    return absl::FailedPreconditionError(
        "the job has another layout than this rank: register it again");
  }
  if (spec.shape != 0 && spec.shape != shape_number_) {
    return absl::FailedPreconditionError(
        absl::StrCat("job \"", options_.name,
                     "\" was registered with other settings since rank ",
                     spec.rank, " registered: register again"));
  }
  const RankSession& rank = ranks_[spec.rank];
  if (rank.attached) {
    return absl::AlreadyExistsError(
        absl::StrCat("rank ", spec.rank, " of job \"", options_.name,
                     "\" is attached already, by process ", rank.spec.pid));
  }
  if (!WasAttachedLast(spec) && IsHeld(spec.rank, spec.process)) {
    return HeldBy(spec.rank);
  }
  const uint64_t needed = shape_->partitions[spec.rank].gradient_area_bytes;
  if (spec.listener == nullptr ||
      (spec.gradient_area == nullptr && needed != 0)) {
    return absl::InvalidArgumentError("no listener or no gradient area");
  }
  if (spec.gradient_area_bytes < needed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the gradients of rank ", spec.rank, " of job \"", options_.name,
        "\" take ", needed, " bytes, there is room for ",
        spec.gradient_area_bytes, ": register again"));
  }
  return absl::OkStatus();
}

absl::StatusOr<AttachResult> JobImpl::Attach(const AttachSpec& spec) {
  absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(CheckMayAttach(spec));
  if (recovery_.has_value()) {
    OPTSTATE_RETURN_IF_ERROR(AdmitToRecovery(spec));
  } else {
    TakeInstance(spec);
  }
  RankSession& rank = ranks_[spec.rank];
  rank.attached = true;
  rank.loss_told = false;
  MarkAttached(spec);
  rank.spec = spec;
  rank.attached_at = absl::Now();
  TakeGradients(spec);
  had_session_ = true;
  if (options_.keeper != nullptr && spec.gradient_segment >= 0) {
    options_.keeper->Keep(spec.rank, spec.client_instance,
                          spec.gradient_offset_bytes, spec.gradient_segment);
  }
  if (recovery_.has_value()) {
    rank.recovering_step = recovery_->record.committed_step;
    TryToFinishStep();
  }
  AttachResult result;
  result.committed_step = record().committed_step;
  result.phase = phase();
  result.has_last_outcome = (record().flags & kStepRecordHasOutcome) != 0;
  if (result.has_last_outcome) result.last_outcome = LastOutcome();
  result.loss_scale = record().loss_scale;
  result.good_steps = record().good_steps;
  result.hysteresis_left = record().hysteresis_left;
  result.loads_finished = record().loads_finished;
  result.load_required_from = record().load_required_from;
  result.speculates = SpeculationBytes(shape_->description) != 0;
  if (shape_->description.accumulate) {
    result.staged = StagedRanges(spec.rank);
  }
  return result;
}

// Marks the rank as attached, for the next engine. A session that cannot
// identify itself is not awaited. A returning one stays attached throughout,
// with an unknown process in between.
void JobImpl::MarkAttached(const AttachSpec& spec) {
  RankMark& mark = rank_mark(spec.rank);
  mark.pid = 0;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  mark.process_start_ticks = spec.process.start_ticks;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  mark.pid = spec.process.pid;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  mark.attached = spec.client_instance != 0 ? 1 : 0;
  ForgetLoss(spec.rank);
}

void JobImpl::Detach(uint32_t rank) {
  absl::MutexLock lock(&mu_);
  Part(rank, /*for_good=*/false);
}

void JobImpl::Leave(uint32_t rank) {
  absl::MutexLock lock(&mu_);
  Part(rank, /*for_good=*/true);
}

// Ends a rank's session. While a step is being finished the rank may return
// with its gradients, and is awaited as before it attached: if its process
// lives, or, when the process cannot be watched, if the step needs gradients
// that only its session has.
void JobImpl::Part(uint32_t rank, bool for_good) {
  if (!CheckAttached(rank).ok()) return;
  const AttachSpec& spec = ranks_[rank].spec;
  const auto is_needed = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return (gradient_areas_[rank] == nullptr ||
            gradient_areas_[rank] == spec.gradient_area) &&
           scheduler_->NeedsGradients(rank, UpdateOfRecovery());
  };
  const bool comes_back =
      recovery_.has_value() && !for_good && !ranks_[rank].has_said_farewell &&
      rank_mark(rank).attached != 0 &&
      (spec.process.pid != 0
           ? !control::HasEnded(spec.process.pid, spec.process.start_ticks)
           : is_needed());
  const bool in_step = open_step_.open() && !recovery_.has_value();
  ranks_[rank].ending.reset();  // no rank to answer
  if (comes_back) {
    open_step_.DropRank(rank);
  } else {
    BeginLoss(rank, in_step);
  }
  LeaveLoadRound(rank, "was lost");
  // The next session that attaches gives its own gradient area.
  if (gradient_areas_[rank] == ranks_[rank].spec.gradient_area) {
    gradient_areas_[rank] = nullptr;
  }
  ranks_[rank] = RankSession{};
  // The next engine may need the gradients of a step that is being finished.
  if (options_.keeper != nullptr && !recovery_.has_value()) {
    options_.keeper->Drop(rank);
  }
  if (comes_back) return;
  EndLoss(rank, in_step);
  if (recovery_.has_value() && LacksGradients(rank)) FailRecovery(rank);
}

void JobImpl::TakeFarewell(uint32_t rank, uint64_t client_instance) {
  absl::MutexLock lock(&mu_);
  GiveUpAway(rank, client_instance);
  if (rank < ranks_.size() && ranks_[rank].attached &&
      client_instance == ranks_[rank].spec.client_instance) {
    ranks_[rank].has_said_farewell = true;
  }
}

void JobImpl::GiveUp(const FormerRank& former) {
  absl::MutexLock lock(&mu_);
  GiveUpAway(former.rank, former.client_instance);
}

void JobImpl::GiveUpAway(uint32_t rank, uint64_t client_instance) {
  if (rank >= ranks_.size() || !IsAwaited(rank) ||
      client_instance != rank_mark(rank).client_instance) {
    return;
  }
  if (!failure_.ok()) {  // all is kept for inspection
    rank_mark(rank).attached = 0;
    return;
  }
  const bool in_step =
      !recovery_.has_value() &&
      (open_step_.open() || WasBegun(record().committed_step + 1) ||
       rank_mark(rank).loss_untold != 0);
  BeginLoss(rank, in_step);
  EndLoss(rank, in_step);
  if (recovery_.has_value() && LacksGradients(rank)) FailRecovery(rank);
}

// Records the loss to be reported before dropping what the rank staged: an
// engine that dies in between leaves the rank attached, and the next one
// repeats this.
void JobImpl::BeginLoss(uint32_t rank, bool in_step) {
  RankMark& mark = rank_mark(rank);
  mark.loss_untold = in_step ? 1 : 0;
  mark.lost_at_step = recovery_.has_value() ? recovery_->record.committed_step
                                            : record().committed_step + 1;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (recovery_.has_value()) {
    // The step is finished with its gradients, or not at all.
    open_step_.DropRank(rank);
  } else {
    DropStaged(rank);
    ::unlink(StagingPath(rank, mark.client_instance).c_str());
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
  mark.attached = 0;
}

// Notifies ranks that already wait. When all ranks are gone, no rank waits for
// the lost ones.
void JobImpl::EndLoss(uint32_t rank, bool in_step) {
  if (AttachedCount() + AwaitedCount() == 0) {
    for (uint32_t each = 0; each < ranks_.size(); ++each) ForgetLoss(each);
  }
  if (in_step) TellOfLoss(rank);
}

// A step begun by ranks that are to return also counts as open.
bool JobImpl::IsDrained() const {
  return draining_ && NoOpenStep() &&
         (AwaitedCount() == 0 || !WasBegun(record().committed_step + 1));
}

// Staged gradients of a former engine's ranks open no step while those ranks
// are away.
bool JobImpl::NoOpenStep() const {
  if (recovery_.has_value()) return false;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].attached && open_step_.opened_by(rank)) return false;
  }
  return true;
}

void JobImpl::BeginDrain() {
  absl::MutexLock lock(&mu_);
  draining_ = true;
}

absl::Status JobImpl::AwaitDrained(absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  if (mu_.AwaitWithDeadline(absl::Condition(this, &JobImpl::IsDrained),
                            deadline)) {
    return absl::OkStatus();
  }
  if (!draining_) {
    return absl::DeadlineExceededError(absl::StrCat(
        "job \"", options_.name, "\" was told to take steps again"));
  }
  // A step is open, so there is a layout and with it a record.
  return absl::DeadlineExceededError(
      absl::StrCat("job \"", options_.name, "\", step ",
                   record().committed_step + 1, ": ", open_step_.Describe()));
}

void JobImpl::Resume() {
  absl::MutexLock lock(&mu_);
  draining_ = false;
  resting_ = false;
}

absl::Status JobImpl::AwaitResumed(absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  const auto resumed = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return !draining_;
  };
  if (mu_.AwaitWithDeadline(absl::Condition(&resumed), deadline)) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(
      absl::StrCat("job \"", options_.name, "\" was told to drain again"));
}

bool JobImpl::NothingUnderWay() const {
  return NoOpenStep() && !load_.active();
}

absl::Status JobImpl::Rest(absl::Time deadline, absl::Duration lease) {
  absl::MutexLock lock(&mu_);
  if (!mu_.AwaitWithDeadline(absl::Condition(this, &JobImpl::NothingUnderWay),
                             deadline)) {
    return absl::DeadlineExceededError(absl::StrCat(
        "job \"", options_.name,
        "\" was never without a step, a load or a recovery under way"));
  }
  resting_ = true;
  rest_end_ = options_.clock() + lease;
  return absl::OkStatus();
}

bool JobImpl::resting() const {
  absl::MutexLock lock(&mu_);
  return resting_ && options_.clock() < rest_end_;
}

void JobImpl::StandStill() {
  {
    absl::MutexLock lock(&mu_);
    resting_ = true;
    rest_end_ = absl::InfiniteFuture();
  }
  EndDurably();
}

// Blocks a call that would begin something until the rest ends. The call is not
// answered if the process ends meanwhile; its session then asks the next
// engine.
void JobImpl::SitOutRest() {
  // Another call of Rest makes the rest longer.
  while (!IsAwake()) {
    if (options_.observer != nullptr) options_.observer->OnSitOut();
    mu_.AwaitWithDeadline(absl::Condition(this, &JobImpl::IsAwake), rest_end_);
  }
  resting_ = false;
}

bool JobImpl::finished() const {
  absl::MutexLock lock(&mu_);
  if (shape_ == nullptr) return had_session_ && failure_.ok();
  return shape_->description.ephemeral && had_session_ &&
         AttachedCount() == 0 && AwaitedCount() == 0;
}

}  // namespace optstate
