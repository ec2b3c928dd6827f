#include "server/session/steps/micro_step_summer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/persist_in_order.h"

namespace optstate::session {
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
absl::Status MicroStepSummer::CheckSums(uint32_t rank) const {
  const std::optional<uint32_t>& by = ranks_.session(rank).sums_dropped_by;
  if (!by.has_value()) return absl::OkStatus();
  return Dropped(*by, job_.record().committed_step + 1);
}

absl::Status MicroStepSummer::PushTogether(uint32_t rank, uint64_t step,
                                           uint32_t micro_step, uint32_t first,
                                           uint32_t end) {
  OPTSTATE_RETURN_IF_ERROR(
      step_.micro_steps.CheckPush(rank, micro_step, first, end));
  marks_.BeginStaging(rank, step, micro_step);
  step_.micro_steps.NotePush(rank, micro_step, first, end);
  // A piece is a whole parameter.
  for (uint32_t p = first; p < end; ++p) {
    step_.open_step.NoteStaged(rank, p, micro_step);
  }
  NotePast(rank, micro_step);
  SumCompletedMicroSteps(first, end);
  return absl::OkStatus();
}

// Sums over all parameters: any of them may have become whole.
void MicroStepSummer::NotePast(uint32_t rank, int64_t end) {
  if (step_.micro_steps.NotePast(rank, end))
    SumCompletedMicroSteps(0, job_.parameter_count());
}

// Sums all that can be summed of parameters [first, end), and answers the ranks
// that have waited for it.
void MicroStepSummer::SumCompletedMicroSteps(uint32_t first, uint32_t end) {
  const StepTimer::Scope staging(&step_.timer, StepTimer::Phase::kStaging);
  absl::Span<const scheduler::StageAction> actions;
  while (true) {
    const int64_t micro_step =
        step_.micro_steps.TakeWhole(first, end, &actions);
    if (micro_step == MicroSteps::kNone) break;
    job_.Stage(
        {.gradient_areas = ranks_.gradient_areas(),
         .first_piece = first,
         .actions = actions,
         .staged_mark = marks_.BeginStaging(0, job_.record().committed_step + 1,
                                            static_cast<uint32_t>(micro_step)),
         .has_pushed = [&](uint32_t rank, uint32_t parameter) {
           return step_.micro_steps.HasPushed(rank, parameter, micro_step);
         }});
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (step_.micro_steps.waiting(rank) == 0)
      AnswerEnding(rank, absl::OkStatus());
  }
}

// Sets the mark before answering: after the answer the rank may be anywhere,
// and will not tell the next engine by itself that it is past the micro-step.
void MicroStepSummer::AnswerEnding(uint32_t rank, const absl::Status& status) {
  if (!ranks_.session(rank).ending.has_value()) return;
  const uint64_t request_id = *ranks_.session(rank).ending;
  ranks_.session(rank).ending.reset();
  if (status.ok() && !step_.open_step.commit(rank).committed) {
    storage::RankMark& mark = job_.rank_mark(rank);
    mark.ended = static_cast<uint64_t>(step_.micro_steps.past(rank));
    storage::PersistInOrder(storage::PersistPoint::kMicroStepEnded);
    mark.ended_epoch = job_.staging_mark(rank).epoch;
    storage::PersistInOrder(storage::PersistPoint::kMicroStepAnswer);
  }
  ranks_.Answer(rank, request_id, status, StepOutcome{});
}

// Drops the sums when a rank drops what it has staged: a sum that includes its
// gradients, or assumed that it had none, is void for all. Without such sums
// the others go on; but runs may have marks of a sum in which an engine died.
void MicroStepSummer::DropSums(uint32_t rank) {
  ranks_.session(rank).sums_dropped_by.reset();
  AnswerEnding(rank, absl::AbortedError(
                         absl::StrCat("rank ", rank, " aborted the step")));
  job_.rank_mark(rank).ended_epoch = 0;
  if (!step_.micro_steps.any_summed()) {
    step_.micro_steps.DropRank(rank);
    if (job_.staging_mark(rank).step != 0) marks_.RenewEpoch(rank);
    return;
  }
  job_.staging_mark(rank).step = 0;
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (other != rank) NotifySumsDropped(other, rank);
  }
  step_.micro_steps.DropAll();
}

void MicroStepSummer::ForgetSums() {
  job_.staging_mark(0).step = 0;
  step_.micro_steps.DropAll();
}

// Notes that a rank that aborts because a lost rank's sums were dropped knows
// of that loss: it is not aborted for it again when it next waits.
void MicroStepSummer::NoteDropAcknowledged(uint32_t rank) {
  const RankSession& session = ranks_.session(rank);
  if (!session.sums_dropped_by.has_value() || !session.sums_dropped_by_loss) {
    return;
  }
  RankLosses& losses = ranks_.losses();
  if (losses.IsUnacknowledged(*session.sums_dropped_by))
    losses.NoteAcknowledged(*session.sums_dropped_by);
}

// Notifies a rank that the sums were dropped. A rank that is away learns this
// when it attaches: nothing of it is staged.
void MicroStepSummer::NotifySumsDropped(uint32_t rank, uint32_t dropped_by) {
  const bool had_part =
      step_.open_step.opened_by(rank) || step_.micro_steps.past(rank) > 0;
  if (had_part && ranks_.state(rank) == RankState::kAttached) {
    const absl::Status status =
        Dropped(dropped_by, job_.record().committed_step + 1);
    ranks_.session(rank).sums_dropped_by = dropped_by;
    ranks_.session(rank).sums_dropped_by_loss =
        ranks_.losses().IsUnacknowledged(dropped_by);
    AnswerEnding(rank, status);
    const OpenStep::RankCommit& commit = step_.open_step.commit(rank);
    if (commit.committed) {
      ranks_.Answer(rank, commit.request_id, status, StepOutcome{});
    }
  }
  step_.open_step.DropRank(rank);
}

// Restores the sums of a former engine before the first rank is attached.
// Gradients of an unfinished sum are still in the areas of their ranks, which
// push them again.
void MicroStepSummer::RestoreSums() {
  const storage::RankMark& shared = job_.staging_mark(0);
  if (shared.step != job_.record().committed_step + 1) return;
  const auto& pieces = job_.shape->partitions[0].pieces;
  for (uint32_t p = 0; p < pieces.size(); ++p) {
    const int64_t summed =
        job_.scheduler->StagedMicroStep(pieces[p], shared.epoch);
    if (summed < 0) continue;
    step_.micro_steps.NoteSummed(p, static_cast<uint32_t>(summed));
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      step_.open_step.NoteStaged(rank, p, static_cast<uint32_t>(summed));
    }
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    storage::RankMark& mark = job_.rank_mark(rank);
    // A mark of the next epoch: the engine died as it began that epoch.
    if (mark.ended_epoch == storage::EpochAfter(shared.epoch)) {
      mark.ended_epoch = shared.epoch;
    }
    if (mark.ended_epoch != shared.epoch) continue;
    step_.micro_steps.NotePast(rank, static_cast<int64_t>(mark.ended));
  }
  job_.scheduler->RestoreSums({shared.epoch});
}

bool MicroStepSummer::IsWaiting(uint32_t rank) const {
  return step_.open_step.commit(rank).committed ||
         ranks_.session(rank).ending.has_value();
}

void MicroStepSummer::AnswerCommits(const absl::Status& status,
                                    const StepOutcome& outcome) {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const OpenStep::RankCommit& commit = step_.open_step.commit(rank);
    if (!commit.committed) continue;
    ranks_.Answer(rank, commit.request_id, status, outcome);
  }
}

}  // namespace optstate::session
