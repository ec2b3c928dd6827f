#include "server/session/steps/step_stager.h"

#include "proto/types/status_macros.h"

namespace optstate::session {

absl::Status StepStager::Stage(uint32_t rank, uint64_t step,
                               uint32_t micro_step, uint32_t first,
                               uint32_t end) {
  step_.progress.Open();
  if (job_.accumulates_together()) {
    return sums_.PushTogether(rank, step, micro_step, first, end);
  }
  OPTSTATE_RETURN_IF_ERROR(speculator_.PrepareForPush(rank, first, end));
  OpenStep::Push push;
  OPTSTATE_RETURN_IF_ERROR(step_.open_step.PlanPush(
      rank, micro_step, first, end, job_.shape->description.accumulate, &push));
  const StepTimer::Scope staging(&step_.timer, StepTimer::Phase::kStaging);
  job_.Stage({.rank = rank,
              .gradient_areas = ranks_.gradient_areas(),
              .first_piece = push.first_piece,
              .actions = push.actions,
              .staged_mark = marks_.BeginStaging(rank, step, micro_step)});
  speculator_.NotePushed(rank, first, end);
  return absl::OkStatus();
}

// Takes the statistics of gradients that some ranks lack: until all ranks had
// committed, these might have come.
void StepStager::StagePartial() {
  const absl::Span<const uint64_t> pushed_by = step_.open_step.pushed_by();
  if (pushed_by.empty()) return;
  job_.Stage({.gradient_areas = ranks_.gradient_areas(),
              .actions = step_.open_step.PlanPartly(),
              .has_pushed = [&](uint32_t rank, uint32_t parameter) {
                return (pushed_by[parameter] >> rank & 1) != 0;
              }});
}

void StepStager::DropStaged(uint32_t rank) {
  speculator_.RollBackSpeculation().IgnoreError();  // the job is then FAILED
  if (job_.accumulates_together()) {
    sums_.DropSums(rank);
  } else {
    job_.staging_mark(rank).step = 0;
  }
  step_.open_step.DropRank(rank);
  if (!step_.open_step.any()) step_.timer.Drop();
}

// Restores what ranks had staged, before the first rank is attached.
void StepStager::RestoreStaged() {
  if (!job_.shape->description.accumulate) return;
  step_.progress.Open();
  if (job_.accumulates_together()) return sums_.RestoreSums();
  std::vector<uint32_t> epochs(ranks_.size(), 0);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const storage::RankMark& mark = job_.rank_mark(rank);
    if (mark.step != job_.record().committed_step + 1) continue;
    epochs[rank] = mark.epoch;
    const auto& pieces = job_.shape->partitions[rank].pieces;
    for (size_t i = 0; i < pieces.size(); ++i) {
      const int64_t staged =
          job_.scheduler->StagedMicroStep(pieces[i], mark.epoch);
      if (staged < 0) continue;
      step_.open_step.NoteStaged(rank, i, static_cast<uint32_t>(staged));
    }
  }
  job_.scheduler->RestoreSums(epochs);
}

absl::Status StepStager::ResolveParameters(absl::Span<const uint8_t>* updated) {
  if (!job_.accumulates_together())
    return step_.open_step.ResolveParameters(updated);
  *updated = step_.micro_steps.SummedParameters();
  return absl::OkStatus();
}

std::vector<StagedRange> StepStager::StagedRanges(uint32_t rank) const {
  if (!job_.accumulates_together()) return step_.open_step.StagedRanges(rank);
  std::vector<StagedRange> ranges;
  for (uint32_t p = 0; p < job_.parameter_count(); ++p) {
    if (step_.micro_steps.summed(p) == MicroSteps::kNone) continue;
    const auto micro_step = static_cast<uint32_t>(step_.micro_steps.summed(p));
    if (!ranges.empty() && ranges.back().micro_step == micro_step &&
        ranges.back().first_piece + ranges.back().piece_count == p) {
      ++ranges.back().piece_count;
    } else {
      ranges.push_back({p, 1, micro_step});
    }
  }
  return ranges;
}

}  // namespace optstate::session
