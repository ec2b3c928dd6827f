// Stages, decides and takes a step.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/commit_content.h"
#include "server/session/job_impl.h"
#include "server/session/loss_scaler.h"
#include "spdlog/spdlog.h"

namespace optstate {
namespace {

// Computes the coefficient of torch.nn.utils.clip_grad_norm_, in double.
double ClipCoefficient(double max_norm, double norm) {
  if (max_norm == 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

std::string LostAt(uint32_t rank, uint64_t step) {
  return absl::StrCat("rank ", rank, " lost at step ", step);
}

std::string WaitingFor(const std::string& lost) {
  return absl::StrCat(lost, ", waiting for its return");
}

}  // namespace

absl::Status JobImpl::CheckStep(uint32_t rank, uint64_t step) const {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached(rank));
  OPTSTATE_RETURN_IF_ERROR(failure_);
  if (recovery_.has_value()) return BeingFinished();
  if (phase() != v1::JOB_PHASE_READY) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", options_.name,
        "\" is loading: every rank must load and finish before a step"));
  }
  if (load_.begun(rank)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank,
        " has begun a load: it must finish it, or abort the step, before"));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckSums(rank));
  const uint64_t next = record().committed_step + 1;
  if (step != next) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", step, " is out of order: job \"", options_.name,
        "\" has committed step ", next - 1, ", the next is ", next));
  }
  if (draining_ && !open_step_.open() && !WasBegun(next)) {
    return absl::UnavailableError(absl::StrCat(
        "job \"", options_.name, "\" is draining and opens no new step"));
  }
  return absl::OkStatus();
}

absl::Status JobImpl::CheckParameterRange(uint64_t first,
                                          uint64_t count) const {
  const uint64_t all = parameter_count();
  if (first <= all && count <= all - first) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(count, " parameters from ", first, " of a layout of ", all));
}

// Returns whether a push or commit is a repeat: the step was decided with what
// this rank had pushed. The rank attached before the step was finished, which
// another rank can have caused by now.
bool JobImpl::IsOfRecoveredStep(uint32_t rank, uint64_t step) const {
  if (step == 0 || !CheckAttached(rank).ok()) return false;
  if (step != ranks_[rank].recovering_step) return false;
  return recovery_.has_value() || step == record().committed_step;
}

absl::Status JobImpl::Push(uint32_t rank, uint64_t step, uint32_t micro_step,
                           uint32_t first_parameter, uint32_t parameter_count) {
  absl::MutexLock lock(&mu_);
  SitOutRest();
  NoteHeard(rank);
  if (IsOfRecoveredStep(rank, step)) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(CheckStep(rank, step));
  OPTSTATE_RETURN_IF_ERROR(
      CheckParameterRange(first_parameter, parameter_count));
  if (open_step_.commit(rank).committed) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " has committed step ", step,
                     " and cannot push to it; abort it to start over"));
  }
  if (accumulates_together()) {
    return PushTogether(rank, step, micro_step, first_parameter,
                        first_parameter + parameter_count);
  }
  OpenStep::Push push;
  OPTSTATE_RETURN_IF_ERROR(open_step_.PlanPush(
      rank, micro_step, first_parameter, first_parameter + parameter_count,
      shape_->description.accumulate, &push));
  const StepTimer::Scope staging(&timer_, StepPhase::kStaging);
  scheduler_->Stage({.rank = rank,
                     .gradient_areas = gradient_areas_,
                     .first_piece = push.first_piece,
                     .actions = push.actions,
                     .staged_mark = BeginStaging(rank, step, micro_step)});
  return absl::OkStatus();
}

// Returns the mark for the rank's runs; see RankMark.
uint64_t JobImpl::BeginStaging(uint32_t rank, uint64_t step,
                               uint32_t micro_step) {
  RankMark& mark = staging_mark(rank);
  if (mark.step != step) {
    RenewEpoch(rank);
    mark.step = step;
  }
  return StagedMark(mark.epoch, micro_step);
}

// Returns whether some rank has staged for the step, in this engine or a former
// one.
bool JobImpl::WasBegun(uint64_t step) const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (staging_mark(rank).step == step) return true;
  }
  return false;
}

// Invalidates all marks of the rank's runs.
void JobImpl::RenewEpoch(uint32_t rank) {
  RankMark& mark = staging_mark(rank);
  const uint32_t epoch = EpochAfter(mark.epoch);
  if (accumulates_together()) CarryEnded(epoch);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  mark.epoch = epoch;
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void JobImpl::DropStaged(uint32_t rank) {
  TakeBackSpeculation().IgnoreError();  // the job is then FAILED
  if (accumulates_together()) {
    DropSums(rank);
  } else {
    staging_mark(rank).step = 0;
  }
  open_step_.DropRank(rank);
  if (!open_step_.open()) timer_.Drop();
}

absl::Status JobImpl::CheckCommit(uint32_t rank, const CommitSpec& spec,
                                  bool* repeated) const {
  OPTSTATE_RETURN_IF_ERROR(failure_);
  OPTSTATE_RETURN_IF_ERROR(CheckContent(spec, layout_of_job().optimizer(),
                                        layout_of_job().groups().size()));
  if (recovery_.has_value() && spec.step == recovery_->record.committed_step &&
      DigestOf(spec) == recovery_->record.commit_digest &&
      !open_step_.commit(rank).committed) {
    return absl::OkStatus();  // answered when the step is finished
  }
  *repeated = spec.step == record().committed_step &&
              (record().flags & kStepRecordHasOutcome) != 0;
  if (*repeated) {
    if (DigestOf(spec) == record().commit_digest) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", spec.step,
        " is committed already, with other hyperparameters, grad_scale or "
        "max_norm"));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckStep(rank, spec.step));
  if (open_step_.commit(rank).committed) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " has committed step ", spec.step,
                     " already and waits for the others (request ",
                     open_step_.commit(rank).request_id, ")"));
  }
  return absl::OkStatus();
}

void JobImpl::Commit(uint32_t rank, uint64_t request_id,
                     const CommitSpec& spec) {
  absl::MutexLock lock(&mu_);
  SitOutRest();
  // No rank to answer: the session ended while this was under way.
  if (!CheckAttached(rank).ok()) return;
  NoteHeard(rank);
  bool repeated = false;
  absl::Status checked = CheckCommit(rank, spec, &repeated);
  if (checked.ok() && !repeated && !recovery_.has_value()) {
    checked = AgreeToStep(rank, "has committed");
  }
  if (!checked.ok() || repeated) {
    ranks_[rank].spec.listener->OnStepDone(
        request_id, checked, checked.ok() ? LastOutcome() : StepOutcome{});
    return;
  }
  open_step_.NoteCommit(rank, request_id, spec);
  // Done also for a rank that has pushed nothing: the next engine knows of the
  // step.
  if (!recovery_.has_value()) BeginStaging(rank, spec.step, 0);
  if (accumulates_together()) NotePast(rank, MicroSteps::kAll);
  timer_.Enter(StepPhase::kWaiting);
  if (recovery_.has_value()) {
    // The rank's earlier pushes have arrived by now, over every wire.
    if (gradient_areas_[rank] == nullptr) {
      gradient_areas_[rank] = ranks_[rank].spec.gradient_area;
    }
    TryToFinishStep();
  } else if (open_step_.all_committed()) {
    CloseStep();
  } else {
    TellOfLost(rank);
    if (Waits(rank)) Speculate(rank);
  }
}

// Takes the step, or refuses it to all, once all ranks have committed.
void JobImpl::CloseStep() {
  timer_.Enter(StepPhase::kDecide);
  absl::Span<const uint8_t> updated;
  absl::Status status = CheckCommitsEqual();
  if (status.ok()) status = ResolveParameters(&updated);
  StepOutcome outcome;
  if (status.ok()) {
    StagePartly();
    const Decision decision = Decide(record().committed_step + 1, updated);
    if (!decision.outcome.applied || decision.clipped) {
      status = TakeBackSpeculation();
    }
    KeepGradientNorms(decision.outcome.step, updated);
    if (status.ok()) status = TakeStep(decision, updated);
    outcome = LastOutcome();
  }
  AnswerCommits(status, outcome);
  if (status.ok()) {
    timer_.Finish(outcome.applied ? scheduler_->UpdateBytes(updated) : 0);
  }
  if (accumulates_together()) ForgetSums();  // every rank has been answered
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) DropStaged(rank);
}

// Takes the statistics of gradients that some ranks lack: until all ranks had
// committed, these might have come.
void JobImpl::StagePartly() {
  const absl::Span<const uint64_t> pushed_by = open_step_.pushed_by();
  if (pushed_by.empty()) return;
  scheduler_->Stage({.gradient_areas = gradient_areas_,
                     .actions = open_step_.PlanPartly(),
                     .has_pushed = [&](uint32_t rank, uint32_t parameter) {
                       return (pushed_by[parameter] >> rank & 1) != 0;
                     }});
}

absl::Status JobImpl::CheckCommitsEqual() const {
  for (uint32_t rank = 1; rank < ranks_.size(); ++rank) {
    OPTSTATE_RETURN_IF_ERROR(CheckEqual(layout_of_job().optimizer(), 0,
                                        open_step_.commit(0).spec, rank,
                                        open_step_.commit(rank).spec));
  }
  return absl::OkStatus();
}

// Returns the norm of the gradients as they arrived. Other norms than L2 are
// not computed while gradients arrive, because only the commit asks for them.
double JobImpl::NormOf(double norm_type, absl::Span<const uint8_t> updated,
                       double sum_of_squares) {
  if (norm_type == 2 || !std::isfinite(sum_of_squares)) {
    return std::sqrt(sum_of_squares);
  }
  StepScheduler::Update update;
  update.updated = updated;
  update.pushed_by = open_step_.pushed_by();
  update.gradient_areas = gradient_areas_;
  return scheduler_->Norm(norm_type, update);
}

double JobImpl::NormOfGroup(size_t group, const CommitSpec& spec,
                            absl::Span<const uint8_t> updated,
                            double sum_of_squares) {
  if (spec.norm_type == 2 || spec.groups[group].max_norm == 0) {
    return std::sqrt(sum_of_squares);
  }
  const auto parameters = layout_of_job().parameters();
  for (uint32_t p = 0; p < parameter_count(); ++p) {
    updated_of_group_[p] =
        updated[p] != 0 && FirstOfClipped(spec, parameters[p].group) == group;
  }
  return NormOf(spec.norm_type, updated_of_group_, sum_of_squares);
}

// Computes group_norms_ from the sums of squares in it.
void JobImpl::NormsOfGroups(const CommitSpec& spec,
                            absl::Span<const uint8_t> updated) {
  const auto group_count = static_cast<uint32_t>(spec.groups.size());
  for (uint32_t i = 0; i < group_count; ++i) {
    const uint32_t first = FirstOfClipped(spec, i);
    if (first != i) group_norms_[first] += group_norms_[i];
  }
  for (uint32_t i = 0; i < group_count; ++i) {
    const uint32_t first = FirstOfClipped(spec, i);
    group_norms_[i] = first == i
                          ? NormOfGroup(i, spec, updated, group_norms_[i])
                          : group_norms_[first];
  }
}

// Fills intent_groups_.
JobImpl::Decision JobImpl::Decide(uint64_t step,
                                  absl::Span<const uint8_t> updated) {
  const CommitSpec& spec = open_step_.commit(0).spec;
  const double sum =
      scheduler_->SumOfSquares(updated, absl::MakeSpan(group_norms_));
  Decision decision;
  StepOutcome& outcome = decision.outcome;
  outcome.step = step;
  outcome.gradient_norm =
      NormOf(spec.norm_type, updated, sum) / spec.grad_scale;
  // True also when finite gradients overflow as they are unscaled.
  outcome.found_inf = !std::isfinite(outcome.gradient_norm);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    outcome.found_inf |= open_step_.commit(rank).spec.found_inf;
  }
  outcome.applied = !outcome.found_inf;
  if (outcome.applied) {
    outcome.clip_coefficient =
        ClipCoefficient(spec.max_norm, outcome.gradient_norm);
  }
  NormsOfGroups(spec, updated);
  FillIntentGroups(spec, outcome.clip_coefficient);
  for (const StepIntentGroup& group : intent_groups_) {
    decision.clipped |= group.gradient_factor != 1 / spec.grad_scale;
  }
  return decision;
}

// Each group is clipped by its own norm, all by that of the gradients as they
// arrived: the coefficients multiply.
void JobImpl::FillIntentGroups(const CommitSpec& spec, double coefficient) {
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    const double norm = group_norms_[i] / spec.grad_scale;
    intent_groups_[i].hyperparams = spec.groups[i];
    intent_groups_[i].gradient_factor =
        coefficient * ClipCoefficient(spec.groups[i].max_norm, norm) /
        spec.grad_scale;
  }
}

// Keeps the norms for Fetch; pushes of the next step overwrite the sums.
void JobImpl::KeepGradientNorms(uint64_t step,
                                absl::Span<const uint8_t> updated) {
  scheduler_->NormsByParameter(updated, absl::MakeSpan(gradient_norms_));
  for (uint32_t p = 0; p < parameter_count(); ++p) {
    double& norm = gradient_norms_[p];
    norm = updated[p] == 0 ? -1 : norm / open_step_.commit(0).spec.grad_scale;
  }
  gradient_norms_step_ = step;
}

// Takes a decided step. A skipped step changes only the record: its number is
// used up, so that all ranks agree on which step is next.
absl::Status JobImpl::TakeStep(const Decision& decision,
                               absl::Span<const uint8_t> updated) {
  const StepOutcome& outcome = decision.outcome;
  StepRecord next = record();
  next.committed_step = outcome.step;
  next.commit_digest = DigestOf(open_step_.commit(0).spec);
  next.gradient_norm = outcome.gradient_norm;
  next.clip_coefficient = outcome.clip_coefficient;
  next.flags = kStepRecordHasOutcome |
               (outcome.applied ? kStepRecordApplied : 0) |
               (outcome.found_inf ? kStepRecordFoundInf : 0);
  next.update_ns = 0;
  if (shape_->description.loss_scaler.has_value()) {
    AdvanceLossScaler(*shape_->description.loss_scaler, outcome.found_inf,
                      &next);
  }
  if (!outcome.applied) {
    Record(next);
    ++skipped_steps_;
    return MakeDurableIfDue(/*is_load=*/false);
  }
  const double gradient_limit = open_step_.commit(0).spec.max_value;
  MarkStep(next, gradient_limit, updated);
  StepScheduler::Update update;
  update.step = outcome.step;
  update.groups = intent_groups_;
  update.gradient_limit = gradient_limit;
  update.updated = updated;
  update.pushed_by = open_step_.pushed_by();
  update.gradient_areas = gradient_areas_;
  return ApplyStep(update, next);
}

// Marks the step before the first tile is touched: an engine that dies from
// here on until the record is published leaves a step that the next one
// finishes as it was decided. The compiler must not move these stores, nor the
// tiles' stores up; the processor's order does not matter, for no other thread
// looks, only a process that comes later.
void JobImpl::MarkStep(const StepRecord& next, double gradient_limit,
                       absl::Span<const uint8_t> updated) {
  StepIntentHeader header = {};
  header.record = next;
  // Known when the step is recorded.
  header.record.committed_at_ns = 0;
  header.record.crc32c = 0;
  header.gradient_limit = gradient_limit;
  WriteStepIntent(header, intent_groups_, updated, open_step_.pushed_by(),
                  tier_->recovery().step_intent);
  ControlFile& control = *tier_->control();
  control.counts_begun.store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  control.step_in_progress.store(next.committed_step,
                                 std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (options_.observer != nullptr) {
    options_.observer->OnStepMarked(next.committed_step);
  }
}

// Does the remaining part of a step that is marked.
absl::Status JobImpl::ApplyStep(const StepScheduler::Update& update,
                                StepRecord next) {
  timer_.Enter(StepPhase::kUpdate);
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status applied = scheduler_->Apply(update);
  if (!applied.ok()) {
    return FailInside(absl::StrCat("step ", update.step), applied);
  }
  const auto elapsed = std::chrono::steady_clock::now() - begin;
  next.update_ns =
      static_cast<uint64_t>(std::chrono::nanoseconds(elapsed).count());
  Record(next);
  return MakeDurableIfDue(/*is_load=*/false);
}

void JobImpl::Record(const StepRecord& next) {
  timer_.Enter(StepPhase::kPublish);
  StepRecord record = next;
  // absl::Now() is not used: it repeats reading the clock until a read is
  // quick, which under a stepping debugger is never.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  record.committed_at_ns = std::chrono::nanoseconds(now).count();
  PublishRecord(record, tier_->control());
  if (options_.observer != nullptr) {
    options_.observer->OnStepRecorded(record.committed_step);
  }
  tier_->control()->step_in_progress.store(0, std::memory_order_release);
  for (RankSession& rank : ranks_) {
    rank.committed_step = record.committed_step;
  }
}

void JobImpl::AnswerCommits(const absl::Status& status,
                            const StepOutcome& outcome) {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const OpenStep::RankCommit& commit = open_step_.commit(rank);
    if (!commit.committed) continue;
    ranks_[rank].spec.listener->OnStepDone(commit.request_id, status, outcome);
  }
}

bool JobImpl::Waits(uint32_t rank) const {
  return open_step_.commit(rank).committed || ranks_[rank].ending.has_value();
}

bool JobImpl::NobodyWaits() const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (Waits(rank)) return false;
  }
  return true;
}

void JobImpl::ForgetLoss(uint32_t rank) {
  rank_mark(rank).lost_at_step = 0;
  rank_mark(rank).loss_untold = 0;
}

// Notifies ranks waiting in the open step; they already know of earlier losses.
void JobImpl::TellOfLoss(uint32_t rank) {
  const std::string what = LostAt(rank, record().committed_step + 1);
  spdlog::warn("{}: job={} waiting=\"{}\"", what, options_.name,
               open_step_.Describe());
  if (options_.config.engine().on_rank_loss() == v1::RANK_LOSS_ABORT) {
    return AbortForLoss(rank, what);
  }
  const std::string notice = WaitingFor(what);
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (Waits(other)) ranks_[other].spec.listener->OnNotice(notice);
  }
}

// Aborts the waiting ranks. Only a later call of one of them shows that they
// know of the loss, see NoteHeard().
void JobImpl::AbortForLoss(uint32_t lost, const std::string& what) {
  const absl::Status aborted = absl::AbortedError(
      absl::StrCat(what, "; what this rank staged is dropped"));
  AnswerCommits(aborted, StepOutcome{});
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (!Waits(other)) continue;
    AnswerEnding(other, aborted);
    DropStaged(other);
    ranks_[other].was_told_of_loss = true;
    ranks_[lost].loss_told = true;
  }
}

// Notes another call of the rank, which shows that it has had its answer.
void JobImpl::NoteHeard(uint32_t rank) {
  if (rank >= ranks_.size() ||
      !std::exchange(ranks_[rank].was_told_of_loss, false)) {
    return;
  }
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (ranks_[other].loss_told) rank_mark(other).loss_untold = 0;
  }
}

// Notifies a rank that begins to wait of all lost ranks.
void JobImpl::TellOfLost(uint32_t rank) {
  const bool aborts =
      options_.config.engine().on_rank_loss() == v1::RANK_LOSS_ABORT;
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    const uint64_t step = rank_mark(other).lost_at_step;
    if (step == 0) continue;
    const bool untold =
        rank_mark(other).loss_untold != 0 && !ranks_[other].loss_told;
    if (aborts && untold && step == record().committed_step + 1) {
      return AbortForLoss(other, LostAt(other, step));
    }
    ranks_[rank].spec.listener->OnNotice(WaitingFor(LostAt(other, step)));
  }
}

absl::Status JobImpl::Abort(uint32_t rank, uint64_t step) {
  absl::MutexLock lock(&mu_);
  NoteHeard(rank);
  OPTSTATE_RETURN_IF_ERROR(CheckAttached(rank));
  OPTSTATE_RETURN_IF_ERROR(failure_);
  if (recovery_.has_value()) return BeingFinished();
  const uint64_t next = record().committed_step + 1;
  if (step != next) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", step, " cannot be aborted: job \"", options_.name,
                     "\" has committed step ", next - 1));
  }
  if (load_.finished(rank)) {
    ranks_[rank].spec.listener->OnStepDone(
        load_.request_id(rank),
        absl::AbortedError(absl::StrCat("rank ", rank, " aborted its load")),
        StepOutcome{});
  }
  LeaveLoadRound(rank, "has aborted its load");
  const OpenStep::RankCommit& commit = open_step_.commit(rank);
  const bool committed = commit.committed;
  const uint64_t request_id = commit.request_id;
  NoteHeardOfDrop(rank);
  DropStaged(rank);
  if (committed) {
    ranks_[rank].spec.listener->OnStepDone(
        request_id,
        absl::AbortedError(absl::StrCat("rank ", rank, " aborted step ", step)),
        StepOutcome{});
  }
  return absl::OkStatus();
}

}  // namespace optstate
