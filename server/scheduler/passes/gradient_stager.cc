#include "server/scheduler/passes/gradient_stager.h"

#include <algorithm>

#include "proto/types/runs.h"
#include "storage/format/rank_mark.h"

namespace optstate::scheduler {

void GradientStager::Stage(const StagingRequest& staging) {
  if (staging.actions.empty()) return;
  const auto& pieces = plan_.partitions()[staging.rank].pieces;
  const auto grain_of = [&](const Piece& piece, uint64_t element) {
    return plan_.grains().IndexOf(piece.parameter, element);
  };
  // Pieces without elements at either end have nothing to schedule.
  const Piece* first = &pieces[staging.first_piece];
  const Piece* last = first + staging.actions.size() - 1;
  while (first <= last && first->numel == 0) ++first;
  while (last > first && last->numel == 0) --last;
  if (first > last) return;
  const uint32_t begin = grain_of(*first, first->begin);
  const uint32_t end = grain_of(*last, last->begin + last->numel - 1) + 1;
  executor_.Reduce({begin, end, plan_.grains().size()},
                   [&](size_t i, Visit visit) {
                     StageGrain(plan_.grains()[i], staging, visit);
                   });
}

void GradientStager::StageGrain(const SubGroup& grain,
                                const StagingRequest& staging,
                                Visit visit) const {
  const RankPartition& partition = plan_.partitions()[staging.rank];
  const size_t end_piece = staging.first_piece + staging.actions.size();
  ReduceTask task;
  GradientAddresses::Buffer buffer;
  for (size_t i = std::max(staging.first_piece,
                           partition.LowerBound(grain.first_parameter));
       i < end_piece; ++i) {
    const Piece& piece = partition.pieces[i];
    if (piece.parameter >= grain.end_parameter) return;
    if (staging.actions[i - staging.first_piece] == StageAction::kNothing) {
      continue;
    }
    const uint64_t flat = plan_.layout().flat_offset(piece.parameter);
    // The part of the piece within the sub-group, in elements of the parameter.
    const uint64_t begin = std::max(flat + piece.begin, grain.begin) - flat;
    const uint64_t end = std::min(flat + piece.begin + piece.numel, grain.end);
    if (flat + begin >= end) continue;
    StagePiece(staging, piece, begin, end - flat, &task, &buffer, visit);
  }
}

void GradientStager::StagePiece(const StagingRequest& staging,
                                const Piece& piece, uint64_t begin,
                                uint64_t end, ReduceTask* task,
                                GradientAddresses::Buffer* buffer,
                                Visit visit) const {
  const uint32_t p = piece.parameter;
  const PieceTable::Entry entry = {staging.rank, piece.begin,
                                   piece.begin + piece.numel,
                                   piece.gradient_offset_bytes};
  task->gradient_dtype = plan_.layout().parameters()[p].gradient_dtype;
  ForEachRun(plan_.layout(), p, begin, end,
             [&](uint64_t run, uint64_t run_begin, uint64_t numel) {
               task->run = run;
               task->numel = numel;
               task->result = &sums_of_squares_[run];
               if (plan_.accumulates() &&
                   !SetSumTarget(p, run_begin, staging.staged_mark, task)) {
                 return;
               }
               task->gradients = addresses_.Pushed(p, entry, run_begin,
                                                   staging.gradient_areas,
                                                   staging.has_pushed, buffer);
               visit(*task);
             });
}

// Returns false when the sum has the gradient already.
bool GradientStager::SetSumTarget(uint32_t parameter, uint64_t begin,
                                  uint64_t staged_mark,
                                  ReduceTask* task) const {
  SumTarget& sum = task->sum;
  sum.mark = &memory_.recovery.staged_marks[task->run];
  const uint64_t before = sum.mark->load(std::memory_order_relaxed);
  if (before == staged_mark) return false;
  sum.data = memory_.store->sums(parameter, begin);
  sum.dtype = plan_.sum_dtype(parameter);
  sum.is_first = storage::EpochOf(before) != storage::EpochOf(staged_mark);
  sum.mark_value = staged_mark;
  return true;
}

}  // namespace optstate::scheduler
