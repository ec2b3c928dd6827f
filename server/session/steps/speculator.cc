#include "server/session/steps/speculator.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "server/session/steps/commit_content.h"

namespace optstate::session {

void Speculator::Reset() {
  foreseen_.Reset(job_.layout().groups().size());
  progress_.assign(job_.parameter_count(), Progress::kAwaited);
  batch_.assign(job_.parameter_count(), 0);
  ready_.clear();
  ready_.reserve(job_.parameter_count());
  batch_elements_min_ =
      std::min(kBatchElementsMin, job_.layout().element_count() / kBatchesMax);
  ForgetProgress();
  if (job_.speculates() && !HasSpeculated()) {
    job_.scheduler->ForgetSpeculation();
  }
}

void Speculator::ForgetProgress() {
  is_guess_ = false;
  std::fill(progress_.begin(), progress_.end(), Progress::kAwaited);
  ready_.clear();
  ready_elements_ = 0;
  must_find_ready_ = true;
}

void Speculator::NoteIfReady(uint32_t parameter) {
  if (progress_[parameter] != Progress::kAwaited ||
      !step_.open_step.IsWhole(parameter)) {
    return;
  }
  progress_[parameter] = Progress::kReady;
  ready_.push_back(parameter);
  ready_elements_ +=
      static_cast<uint64_t>(job_.layout().parameters()[parameter].numel);
}

void Speculator::FindReady() {
  if (!std::exchange(must_find_ready_, false)) return;
  for (uint32_t p = 0; p < progress_.size(); ++p) NoteIfReady(p);
}

// Notes nothing after a rollback: FindReady() then finds all that was pushed.
void Speculator::NotePushed(uint32_t rank, uint32_t first, uint32_t end) {
  if (!job_.speculates() || must_find_ready_) return;
  const RankPartition& partition = job_.shape->partitions[rank];
  for (size_t i = partition.LowerBound(first); i < partition.LowerBound(end);
       ++i) {
    NoteIfReady(partition.pieces[i].parameter);
  }
}

// A step that is decided is finished, never rolled back.
bool Speculator::HasSpeculated() const {
  const storage::ControlFile& control = *job_.tier->control();
  const uint64_t step = job_.record().committed_step + 1;
  return control.step_speculated.load(std::memory_order_relaxed) == step &&
         control.step_in_progress.load(std::memory_order_relaxed) != step;
}

// Answers all ranks that wait, and drops their commits, so that no other room
// answers them once more.
absl::Status Speculator::Fail(const absl::Status& why) {
  absl::Status failed = job_.FailInside("a speculation", why);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    RankSession& session = ranks_.session(rank);
    const OpenStep::RankCommit& commit = step_.open_step.commit(rank);
    if (session.ending.has_value()) {
      ranks_.Answer(rank, *session.ending, failed, StepOutcome{});
      session.ending.reset();
    }
    if (commit.committed) {
      ranks_.Answer(rank, commit.request_id, failed, StepOutcome{});
    }
  }
  step_.open_step.DropAll();
  return failed;
}

// Returns whether every rank is in the step and asked for no parameters in it.
// One that is not in it, or has lost its connection, may still read those of
// the step before.
bool Speculator::MayBegin() const {
  if (held_step_ == job_.record().committed_step + 1) return false;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_.state(rank) != RankState::kAttached ||
        !step_.open_step.opened_by(rank)) {
      return false;
    }
  }
  return true;
}

// Returns false when the step will be refused to all.
bool Speculator::HaveCommitsEqual(uint32_t rank) const {
  const CommitSpec& spec = step_.open_step.commit(rank).spec();
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    const OpenStep::RankCommit& commit = step_.open_step.commit(other);
    if (commit.committed && !AsksForTheSame(commit.spec(), spec)) return false;
  }
  return true;
}

void Speculator::Begin(const CommitSpec& spec,
                       absl::Span<const uint8_t> updated) {
  for (uint32_t p = 0; p < progress_.size(); ++p) {
    if (updated[p] != 0) progress_[p] = Progress::kBegun;
  }
  if (!std::isfinite(decider_.SumOfSquares(updated))) return;  // skipped
  scheduler::StepScheduler::Update update;
  update.step = job_.record().committed_step + 1;
  update.groups = decider_.GroupsWithoutClipping(spec);
  update.gradient_limit = spec.max_value;
  update.updated = updated;
  update.gradient_areas = ranks_.gradient_areas();
  const StepTimer::Scope updating(&step_.timer, StepTimer::Phase::kUpdate);
  const absl::Status begun =
      job_.MakePass([&] { return job_.scheduler->Speculate(update); });
  // Not lost: it is the job's failure now, which is the answer to ranks that
  // wait, and to the others' next calls.
  if (!begun.ok()) return Fail(begun).IgnoreError();
  if (std::exchange(last_begun_step_, update.step) != update.step) {
    ++steps_begun_;
  }
}

// A rank that has committed pushes nothing any more, so that sums of
// micro-steps are complete too.
void Speculator::Speculate(uint32_t rank) {
  if (!job_.speculates()) return;
  const CommitSpec& spec = step_.open_step.commit(rank).spec();
  if (is_guess_ && !AsksForTheSame(*foreseen_.spec(), spec) &&
      !RollBackSpeculation().ok()) {
    return;
  }
  if (spec.found_inf || !foreseen_.is_plain() || !MayBegin() ||
      !HaveCommitsEqual(rank)) {
    return;
  }
  Begin(spec, step_.open_step.CommittedParameters());
}

// Returns what the open step will be taken with: what the first rank that has
// committed says. Null: not known, or skipped.
const CommitSpec* Speculator::ExpectedCommit() const {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const OpenStep::RankCommit& commit = step_.open_step.commit(rank);
    if (!commit.committed) continue;
    const bool is_plain = foreseen_.is_plain() && !commit.spec().found_inf &&
                          HaveCommitsEqual(rank);
    return is_plain ? &commit.spec() : nullptr;
  }
  return foreseen_.spec();
}

bool Speculator::SpeculateOnPushed() {
  // Until its rank commits, a sum may get another micro-step.
  if (!job_.speculates() || job_.shape->description.accumulate) return false;
  const CommitSpec* spec = ExpectedCommit();
  if (spec == nullptr || !MayBegin()) return false;
  FindReady();
  if (ready_.empty() || ready_elements_ < batch_elements_min_) return false;
  uint64_t elements = 0;
  size_t taken = 0;
  for (; taken < ready_.size() && elements < kBatchElements; ++taken) {
    const uint32_t p = ready_[taken];
    const auto numel =
        static_cast<uint64_t>(job_.layout().parameters()[p].numel);
    ready_elements_ -= numel;
    if (progress_[p] == Progress::kBegun) continue;
    batch_[p] = 1;
    elements += numel;
  }
  if (elements > 0) {
    is_guess_ |= spec == foreseen_.spec();
    Begin(*spec, batch_);
  }
  for (size_t i = 0; i < taken; ++i) batch_[ready_[i]] = 0;
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<ptrdiff_t>(taken));
  return ready_elements_ >= batch_elements_min_ && !ready_.empty() &&
         job_.failure.ok();
}

absl::Status Speculator::PrepareForPush(uint32_t rank, uint32_t first,
                                        uint32_t end) {
  if (!HasSpeculated()) return absl::OkStatus();
  const RankPartition& partition = job_.shape->partitions[rank];
  for (size_t i = partition.LowerBound(first); i < partition.LowerBound(end);
       ++i) {
    if (progress_[partition.pieces[i].parameter] == Progress::kBegun) {
      return RollBackSpeculation();
    }
  }
  return absl::OkStatus();
}

absl::Status Speculator::PrepareForDecision(const StepDecision& decision,
                                            const CommitSpec& spec) {
  const bool is_plain = decision.outcome.applied && !decision.clipped;
  const bool is_wrong =
      !is_plain || (is_guess_ && !AsksForTheSame(*foreseen_.spec(), spec));
  if (is_wrong) {
    const absl::Status rolled_back = RollBackSpeculation();
    if (!rolled_back.ok()) return rolled_back;
  }
  foreseen_.Note(spec, is_plain);
  ForgetProgress();
  return absl::OkStatus();
}

absl::Status Speculator::RollBackSpeculation() {
  ForgetProgress();
  if (!job_.failure.ok() || !HasSpeculated()) return absl::OkStatus();
  const uint64_t step = job_.record().committed_step + 1;
  ++steps_rolled_back_;
  const absl::Status restored =
      job_.MakePass([&] { return job_.scheduler->RollBackSpeculation(step); });
  return restored.ok() ? restored : Fail(restored);
}

absl::Status Speculator::HoldOpenStep() {
  if (!job_.speculates()) return absl::OkStatus();
  if (step_.open_step.any()) held_step_ = job_.record().committed_step + 1;
  // A script that reads in each step would lose time by each.
  if (HasSpeculated()) foreseen_.NoteRolledBack();
  return RollBackSpeculation();
}

void Speculator::Describe(v1::Job* job) const {
  if (!job_.speculates()) return;
  v1::Speculation* speculation = job->mutable_speculation();
  speculation->set_steps_begun(steps_begun_);
  speculation->set_steps_rolled_back(steps_rolled_back_);
}

}  // namespace optstate::session
