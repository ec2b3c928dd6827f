// Sums the micro-steps of the ranks, in a job whose engine reduces.

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/job_impl.h"

namespace optstate {
namespace {

absl::Status Dropped(uint32_t dropped_by, uint64_t step) {
  return absl::AbortedError(absl::StrCat(
      "rank ", dropped_by, " was lost or has aborted in step ", step,
      ", and with it the sums of the ranks' micro-steps: abort the step and "
      "take it again from its first micro-step"));
}

}  // namespace

// Returns an error until the rank has aborted, so that none of its pushes in
// transit begins the step again without the earlier ones.
absl::Status JobImpl::CheckSums(uint32_t rank) const {
  const std::optional<uint32_t>& by = ranks_[rank].sums_dropped_by;
  if (!by.has_value()) return absl::OkStatus();
  return Dropped(*by, record().committed_step + 1);
}

absl::Status JobImpl::PushTogether(uint32_t rank, uint64_t step,
                                   uint32_t micro_step, uint32_t first,
                                   uint32_t end) {
  OPTSTATE_RETURN_IF_ERROR(
      micro_steps_.CheckPush(rank, micro_step, first, end));
  BeginStaging(rank, step, micro_step);
  micro_steps_.NotePush(rank, micro_step, first, end);
  // A piece is a whole parameter.
  for (uint32_t p = first; p < end; ++p) {
    open_step_.NoteStaged(rank, p, micro_step);
  }
  NotePast(rank, micro_step);
  SumWhole(first, end);
  return absl::OkStatus();
}

absl::Status JobImpl::CheckEnding(uint32_t rank, uint64_t step) const {
  OPTSTATE_RETURN_IF_ERROR(CheckStep(rank, step));
  if (open_step_.commit(rank).committed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has committed step ", step,
        " and cannot end a micro-step of it; abort it to start over"));
  }
  if (ranks_[rank].ending.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " waits for the end of a micro-step of ", "step ", step,
        " already (request ", *ranks_[rank].ending, ")"));
  }
  return absl::OkStatus();
}

void JobImpl::EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                           uint32_t micro_step) {
  absl::MutexLock lock(&mu_);
  SitOutRest();
  NoteHeard(rank);
  // No rank to answer: the session ended while this was under way.
  if (!CheckAttached(rank).ok()) return;
  absl::Status status;
  const bool repeated = IsOfRecoveredStep(rank, step);
  if (!repeated) status = CheckEnding(rank, step);
  // Otherwise the rank does not wait for others.
  if (!repeated && status.ok() && accumulates_together()) {
    status = AgreeToStep(rank, "has ended a micro-step of");
  }
  if (repeated || !status.ok() || !accumulates_together()) {
    ranks_[rank].spec.listener->OnStepDone(request_id, status, StepOutcome{});
    return;
  }
  BeginStaging(rank, step, micro_step);
  ranks_[rank].ending = request_id;
  NotePast(rank, int64_t{micro_step} + 1);
  SumWhole(0, 0);
  if (Waits(rank)) TellOfLost(rank);
}

// Sums over all parameters: any of them may have become whole.
void JobImpl::NotePast(uint32_t rank, int64_t end) {
  if (micro_steps_.NotePast(rank, end)) SumWhole(0, parameter_count());
}

// Sums all that can be summed of parameters [first, end), and answers the ranks
// that have waited for it.
void JobImpl::SumWhole(uint32_t first, uint32_t end) {
  const StepTimer::Scope staging(&timer_, StepPhase::kStaging);
  absl::Span<const StageAction> actions;
  while (true) {
    const int64_t micro_step = micro_steps_.TakeWhole(first, end, &actions);
    if (micro_step == MicroSteps::kNone) break;
    scheduler_->Stage(
        {.gradient_areas = gradient_areas_,
         .first_piece = first,
         .actions = actions,
         .staged_mark = BeginStaging(0, record().committed_step + 1,
                                     static_cast<uint32_t>(micro_step)),
         .has_pushed = [&](uint32_t rank, uint32_t parameter) {
           return micro_steps_.HasPushed(rank, parameter, micro_step);
         }});
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (micro_steps_.waiting(rank) == 0) AnswerEnding(rank, absl::OkStatus());
  }
}

// Sets the mark before answering: after the answer the rank may be anywhere,
// and will not tell the next engine by itself that it is past the micro-step.
void JobImpl::AnswerEnding(uint32_t rank, const absl::Status& status) {
  if (!ranks_[rank].ending.has_value()) return;
  const uint64_t request_id = *ranks_[rank].ending;
  ranks_[rank].ending.reset();
  if (status.ok() && !open_step_.commit(rank).committed) {
    RankMark& mark = rank_mark(rank);
    mark.ended = static_cast<uint64_t>(micro_steps_.past(rank));
    std::atomic_signal_fence(std::memory_order_seq_cst);
    mark.ended_epoch = staging_mark(rank).epoch;
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  ranks_[rank].spec.listener->OnStepDone(request_id, status, StepOutcome{});
}

// Carries the marks of ended micro-steps into an epoch that begins because some
// rank dropped its part: the other ranks do not repeat their ends. Marks left
// by a former engine or step do not count.
void JobImpl::CarryEnded(uint32_t epoch) {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    RankMark& mark = rank_mark(rank);
    const bool counts =
        mark.ended_epoch == staging_mark(0).epoch &&
        micro_steps_.past(rank) >= static_cast<int64_t>(mark.ended);
    mark.ended_epoch = counts ? epoch : 0;
  }
}

void JobImpl::ForgetSums() {
  staging_mark(0).step = 0;
  micro_steps_.DropAll();
}

// Drops the sums when a rank drops what it has staged: a sum that includes its
// gradients, or assumed that it had none, is void for all. Without such sums
// the others go on; but runs may have marks of a sum in which an engine died.
void JobImpl::DropSums(uint32_t rank) {
  ranks_[rank].sums_dropped_by.reset();
  AnswerEnding(rank, absl::AbortedError(
                         absl::StrCat("rank ", rank, " aborted the step")));
  rank_mark(rank).ended_epoch = 0;
  if (!micro_steps_.any_summed()) {
    micro_steps_.DropRank(rank);
    if (staging_mark(rank).step != 0) RenewEpoch(rank);
    return;
  }
  staging_mark(rank).step = 0;
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (other != rank) TellOfDrop(other, rank);
  }
  micro_steps_.DropAll();
}

// Notes that a rank that aborts because a lost rank's sums were dropped knows
// of that loss: it is not aborted for it again when it next waits.
void JobImpl::NoteHeardOfDrop(uint32_t rank) {
  const RankSession& session = ranks_[rank];
  if (!session.sums_dropped_by.has_value() || !session.sums_dropped_by_loss) {
    return;
  }
  rank_mark(*session.sums_dropped_by).loss_untold = 0;
}

// Tells a rank that the sums were dropped. A rank that is away learns this when
// it attaches: nothing of it is staged.
void JobImpl::TellOfDrop(uint32_t rank, uint32_t dropped_by) {
  const bool had_part =
      open_step_.opened_by(rank) || micro_steps_.past(rank) > 0;
  if (had_part && ranks_[rank].attached) {
    const absl::Status status =
        Dropped(dropped_by, record().committed_step + 1);
    ranks_[rank].sums_dropped_by = dropped_by;
    ranks_[rank].sums_dropped_by_loss = rank_mark(dropped_by).loss_untold != 0;
    AnswerEnding(rank, status);
    const OpenStep::RankCommit& commit = open_step_.commit(rank);
    if (commit.committed) {
      ranks_[rank].spec.listener->OnStepDone(commit.request_id, status,
                                             StepOutcome{});
    }
  }
  open_step_.DropRank(rank);
}

// Restores the sums of a former engine before the first rank is attached.
// Gradients of an unfinished sum are still in the areas of their ranks, which
// push them again.
void JobImpl::RestoreSums() {
  const RankMark& shared = staging_mark(0);
  if (shared.step != record().committed_step + 1) return;
  const auto& pieces = shape_->partitions[0].pieces;
  for (uint32_t p = 0; p < pieces.size(); ++p) {
    const int64_t summed = scheduler_->StagedMicroStep(pieces[p], shared.epoch);
    if (summed < 0) continue;
    micro_steps_.NoteSummed(p, static_cast<uint32_t>(summed));
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      open_step_.NoteStaged(rank, p, static_cast<uint32_t>(summed));
    }
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    RankMark& mark = rank_mark(rank);
    // A mark of the next epoch: the engine died as it began that epoch.
    if (mark.ended_epoch == EpochAfter(shared.epoch)) {
      mark.ended_epoch = shared.epoch;
    }
    if (mark.ended_epoch != shared.epoch) continue;
    micro_steps_.NotePast(rank, static_cast<int64_t>(mark.ended));
  }
  scheduler_->RestoreSums({shared.epoch});
}

absl::Status JobImpl::ResolveParameters(absl::Span<const uint8_t>* updated) {
  if (!accumulates_together()) return open_step_.ResolveParameters(updated);
  *updated = micro_steps_.SummedParameters();
  return absl::OkStatus();
}

std::vector<StagedRange> JobImpl::StagedRanges(uint32_t rank) const {
  if (!accumulates_together()) return open_step_.StagedRanges(rank);
  std::vector<StagedRange> ranges;
  for (uint32_t p = 0; p < parameter_count(); ++p) {
    if (micro_steps_.summed(p) == MicroSteps::kNone) continue;
    const auto micro_step = static_cast<uint32_t>(micro_steps_.summed(p));
    if (!ranges.empty() && ranges.back().micro_step == micro_step &&
        ranges.back().first_piece + ranges.back().piece_count == p) {
      ++ranges.back().piece_count;
    } else {
      ranges.push_back({p, 1, micro_step});
    }
  }
  return ranges;
}

}  // namespace optstate
