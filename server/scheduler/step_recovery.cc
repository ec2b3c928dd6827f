// What a process that died left of a step, put in order.

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "kernels/reduce.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/step_scheduler.h"
#include "server/scheduler/worker_undo.h"

namespace optstate {
namespace {

absl::Status Impossible(const WorkerUndo& undo, uint64_t run_count) {
  return absl::DataLossError(absl::StrCat(
      "undo: a slot names run ", undo.run, " of ", run_count, ", kind ",
      undo.kind.load(std::memory_order_relaxed)));
}

}  // namespace

uint64_t StepScheduler::WorkerUndoBytes(int workers) {
  return static_cast<uint64_t>(workers) * sizeof(WorkerUndo);
}

absl::StatusOr<uint64_t> StepScheduler::RollBack(uint64_t step) {
  uint64_t taken_back = 0;
  for (const WorkerUndo& undo : worker_undos()) {
    const uint64_t kind = undo.kind.load(std::memory_order_relaxed);
    if (kind == static_cast<uint64_t>(UndoKind::kNone)) continue;
    const std::atomic<uint64_t>* stamps = options_.recovery.run_stamps;
    if (kind == static_cast<uint64_t>(UndoKind::kAccumulate)) {
      stamps = options_.recovery.staged_marks;
    }
    // Accumulators may have gone since, and what they held with them.
    if (stamps == nullptr) continue;
    if (undo.run >= runs_.run_count()) {
      return Impossible(undo, runs_.run_count());
    }
    // It was done, and only not yet said to be.
    if (stamps[undo.run].load(std::memory_order_relaxed) == undo.stamp) {
      continue;
    }
    if (kind == static_cast<uint64_t>(UndoKind::kUpdate) &&
        undo.stamp != step) {
      return absl::DataLossError(
          absl::StrCat("undo: a slot is in the middle of step ", undo.stamp,
                       ", step ", step, " is in progress"));
    }
    OPTSTATE_RETURN_IF_ERROR(RollBackRun(undo));
    ++taken_back;
  }
  // Only now: a process that dies before does all of it again.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ClearSlots();
  return taken_back;
}

absl::Status StepScheduler::RollBackRun(const WorkerUndo& undo) {
  const Layout& layout = *options_.layout;
  uint32_t first = 0;
  auto count = static_cast<uint32_t>(layout.parameters().size());
  // The last parameter whose first run is not behind this one.
  while (count > 1) {
    const uint32_t half = count / 2;
    if (runs_.first_run(first + half) <= undo.run) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  absl::Status status;
  runs_.ForEachRun(
      first, 0, static_cast<uint64_t>(layout.parameters()[first].numel),
      [&](uint64_t run, uint64_t begin, uint64_t numel) {
        if (run != undo.run) return;
        switch (static_cast<UndoKind>(
            undo.kind.load(std::memory_order_relaxed))) {
          case UndoKind::kUpdate:
            status = optstate::RollBack(
                undo.slot, ViewOf(first, begin, numel),
                static_cast<int>(kernels_[first]->state_array_names.size()));
            return;
          case UndoKind::kAccumulate:
            status = optstate::RollBackSum(
                undo.slot,
                options_.arrays.accumulator + layout.flat_offset(first) + begin,
                numel);
            return;
          default:
            status = Impossible(undo, runs_.run_count());
        }
      });
  return status;
}

int64_t StepScheduler::StagedMicroStep(const Piece& piece,
                                       uint32_t epoch) const {
  int64_t least = -1;
  bool first = true;
  runs_.ForEachRun(
      piece.parameter, piece.begin, piece.begin + piece.numel,
      [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
        const uint64_t mark =
            options_.recovery.staged_marks[run].load(std::memory_order_relaxed);
        const int64_t micro_step =
            EpochOf(mark) == epoch ? int64_t{MicroStepOf(mark)} : -1;
        least = first ? micro_step : std::min(least, micro_step);
        first = false;
      });
  return least;
}

void StepScheduler::RestoreSums(absl::Span<const uint32_t> epochs) {
  for (size_t rank = 0; rank < epochs.size(); ++rank) {
    if (epochs[rank] == 0) continue;
    const auto& pieces = partitions_[rank].pieces;
    options_.pool->ParallelFor(pieces.size(), [&](size_t i) {
      const Piece& piece = pieces[i];
      const float* const sums = options_.arrays.accumulator +
                                options_.layout->flat_offset(piece.parameter);
      runs_.ForEachRun(
          piece.parameter, piece.begin, piece.begin + piece.numel,
          [&](uint64_t run, uint64_t begin, uint64_t numel) {
            const uint64_t mark = options_.recovery.staged_marks[run].load(
                std::memory_order_relaxed);
            if (EpochOf(mark) != epochs[rank]) return;
            run_sums_[run] =
                optstate::SumOfSquares(DType::kFloat32, sums + begin, numel);
          });
    });
  }
}

bool StepScheduler::NeedsGradients(uint32_t rank, const Update& update) const {
  if (options_.arrays.accumulator != nullptr) return false;
  bool needs = false;
  for (const Piece& piece : partitions_[rank].pieces) {
    if (needs || update.updated[piece.parameter] == 0) continue;
    runs_.ForEachRun(
        piece.parameter, piece.begin, piece.begin + piece.numel,
        [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
          needs |= options_.recovery.run_stamps[run].load(
                       std::memory_order_relaxed) != update.step;
        });
  }
  return needs;
}

void StepScheduler::ClearSlots() {
  for (WorkerUndo& undo : worker_undos()) {
    undo.kind.store(static_cast<uint64_t>(UndoKind::kNone),
                    std::memory_order_relaxed);
  }
}

void StepScheduler::ForgetStaged() {
  if (options_.recovery.staged_marks == nullptr) return;
  for (uint64_t run = 0; run < runs_.run_count(); ++run) {
    options_.recovery.staged_marks[run].store(0, std::memory_order_relaxed);
  }
}

void StepScheduler::ForgetStep() {
  ClearSlots();
  for (uint64_t run = 0; run < runs_.run_count(); ++run) {
    options_.recovery.run_stamps[run].store(0, std::memory_order_relaxed);
  }
}

}  // namespace optstate
