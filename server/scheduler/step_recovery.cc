// Repairs what a process that died left of a step.

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "kernels/reduce.h"
#include "proto/types/runs.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/step_scheduler.h"
#include "server/scheduler/worker_undo.h"

namespace optstate {
namespace {

absl::Status Impossible(const WorkerUndo& undo, uint64_t run_count) {
  return absl::DataLossError(
      absl::StrCat("undo: a slot names run ", undo.run, " of ", run_count,
                   ", kind ", undo.kind.load(std::memory_order_relaxed)));
}

size_t FirstNotUpdated(const UndoSlot& slot) {
  return InFlightOf(slot.progress.load(std::memory_order_relaxed)).begin;
}

}  // namespace

uint64_t StepScheduler::WorkerUndoBytes(int workers) {
  return static_cast<uint64_t>(workers) * sizeof(WorkerUndo);
}

absl::StatusOr<uint64_t> StepScheduler::RollBack(uint64_t step) {
  uint64_t in_flight = 0;
  for (WorkerUndo& undo : worker_undos()) {
    const auto kind =
        static_cast<UndoKind>(undo.kind.load(std::memory_order_relaxed));
    if (kind == UndoKind::kNone) continue;
    const std::atomic<uint64_t>* stamps = kind == UndoKind::kAccumulate
                                              ? options_.recovery.staged_marks
                                              : options_.recovery.run_stamps;
    if (undo.run >= layout_.run_count() ||
        (kind != UndoKind::kUpdate && kind != UndoKind::kAccumulate &&
         kind != UndoKind::kReplace) ||
        (kind == UndoKind::kUpdate && whole_ != nullptr)) {
      return Impossible(undo, layout_.run_count());
    }
    if (kind == UndoKind::kReplace) {
      OPTSTATE_ASSIGN_OR_RETURN(const bool complete,
                                CheckReplacement(undo, step));
      if (!complete) ++in_flight;
      continue;
    }
    // The accumulators are gone since, or the run was done and only its slot
    // was not cleared yet.
    if (stamps == nullptr ||
        stamps[undo.run].load(std::memory_order_relaxed) == undo.stamp) {
      undo.Clear();
      continue;
    }
    if (kind == UndoKind::kUpdate && undo.stamp != step) {
      return absl::DataLossError(
          absl::StrCat("undo: a slot is in the middle of step ", undo.stamp,
                       ", step ", step, " is in progress"));
    }
    OPTSTATE_RETURN_IF_ERROR(RollBackRun(&undo));
    ++in_flight;
  }
  return in_flight;
}

absl::Status StepScheduler::CheckStamps(uint64_t last_step) const {
  for (uint64_t run = 0; run < layout_.run_count(); ++run) {
    const uint64_t stamp =
        options_.recovery.run_stamps[run].load(std::memory_order_relaxed);
    if (stamp > last_step) {
      return absl::DataLossError(
          absl::StrCat("run_stamps.u64: run ", run, " (from byte ",
                       run * sizeof(stamp), " on) is stamped with step ", stamp,
                       ", but the last that has begun "
                       "is ",
                       last_step));
    }
  }
  return absl::OkStatus();
}

// Checks a complete replacement, which is installed when the step goes on.
// Returns whether it was installed already.
absl::StatusOr<bool> StepScheduler::CheckReplacement(WorkerUndo& undo,
                                                     uint64_t step) {
  const uint32_t parameter = ParameterOfRun(undo.run);
  if (whole_ == nullptr || undo.run != layout_.first_run(parameter)) {
    return Impossible(undo, layout_.run_count());
  }
  if (IsUpdated(parameter, undo.stamp)) {
    undo.Clear();
    return true;
  }
  if (undo.stamp == step) return false;
  return absl::DataLossError(
      absl::StrCat("undo: a slot is in the middle of step ", undo.stamp,
                   ", step ", step, " is in progress"));
}

absl::Status StepScheduler::RollBackRun(WorkerUndo* undo) {
  const uint32_t parameter = ParameterOfRun(undo->run);
  const bool accumulating = undo->kind.load(std::memory_order_relaxed) ==
                            static_cast<uint64_t>(UndoKind::kAccumulate);
  absl::Status status;
  ForEachRunOf(parameter, [&](uint64_t run, uint64_t begin, uint64_t numel) {
    if (run != undo->run) return;
    if (accumulating) {
      status = optstate::RollBackSum(undo->slot, SumDTypeOf(parameter),
                                     store_.sums(parameter, begin), numel);
      return;
    }
    const auto pin =
        store_.PinSubGroup(store_.sub_groups().IndexOf(parameter, begin),
                           StateStore::Access::kWrite);
    status = pin.status();
    if (!status.ok()) return;
    status = optstate::RollBack(ViewOf(pin->record(), parameter, begin, numel),
                                *kernels_[parameter], layout_.state_format(),
                                layout_.master_format(parameter), &undo->slot)
                 .status();
  });
  if (status.ok() && accumulating) undo->Clear();
  return status;
}

// Returns the last parameter whose first run is not behind this one: parameters
// without runs share its first run, and the last one owns the run.
uint32_t StepScheduler::ParameterOfRun(uint64_t run) const {
  uint32_t first = 0;
  auto count = static_cast<uint32_t>(layout_.parameters().size());
  while (count > 1) {
    const uint32_t half = count / 2;
    if (layout_.first_run(first + half) <= run) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return first;
}

template <typename Visitor>
void StepScheduler::ForEachRunOf(uint32_t parameter,
                                 const Visitor& visit) const {
  ForEachRun(layout_, parameter, 0,
             static_cast<uint64_t>(layout_.parameters()[parameter].numel),
             visit);
}

// Finishes runs in the slots that name them, so that a process which dies here
// leaves what it found, and before the workers take slots anew. There is one
// run per worker, so one thread does it.
absl::Status StepScheduler::FinishRunsInFlight(const Update& update) {
  for (WorkerUndo& undo : worker_undos()) {
    const auto kind =
        static_cast<UndoKind>(undo.kind.load(std::memory_order_relaxed));
    if (kind == UndoKind::kReplace) {
      OPTSTATE_ASSIGN_OR_RETURN(
          const StateStore::Pin pin,
          store_.PinSubGroup(
              store_.sub_groups().IndexOf(ParameterOfRun(undo.run), 0),
              StateStore::Access::kWrite));
      PutInPlace(pin.record(), &undo, RedoOf(undo));
    } else if (kind != UndoKind::kNone) {
      OPTSTATE_RETURN_IF_ERROR(FinishRun(update, &undo));
    }
  }
  return absl::OkStatus();
}

absl::Status StepScheduler::FinishRun(const Update& update, WorkerUndo* undo) {
  const uint32_t p = ParameterOfRun(undo->run);
  const UpdateFactors factors = kernels_[p]->prepare(InputOf(p, update));
  GradientSources sources;
  absl::Status status;
  ForEachRunOf(p, [&](uint64_t run, uint64_t begin, uint64_t numel) {
    if (run != undo->run) return;
    const auto pin = store_.PinSubGroup(store_.sub_groups().IndexOf(p, begin),
                                        StateStore::Access::kWrite);
    status = pin.status();
    if (!status.ok()) return;
    for (const PieceTable::Entry& piece : OwnersOf(p)) {
      if (begin < piece.begin || begin >= piece.end) continue;
      TileView view = ViewOf(pin->record(), p, begin, numel);
      view.gradients = GradientsOf(p, piece, begin, update, &sources);
      view.begin = FirstNotUpdated(undo->slot);
      view.undo = &undo->slot;
      kernels_[p]->apply(factors, view);
      undo->End(&options_.recovery.run_stamps[run]);
      if (options_.observer != nullptr) {
        options_.observer->OnRunUpdated(update.step, run);
      }
    }
  });
  return status;
}

int64_t StepScheduler::StagedMicroStep(const Piece& piece,
                                       uint32_t epoch) const {
  int64_t least = -1;
  bool first = true;
  ForEachRun(layout_, piece.parameter, piece.begin, piece.begin + piece.numel,
             [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
               const uint64_t mark = options_.recovery.staged_marks[run].load(
                   std::memory_order_relaxed);
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
      ForEachRun(
          layout_, piece.parameter, piece.begin, piece.begin + piece.numel,
          [&](uint64_t run, uint64_t begin, uint64_t numel) {
            const uint64_t mark = options_.recovery.staged_marks[run].load(
                std::memory_order_relaxed);
            if (EpochOf(mark) != epochs[rank]) return;
            run_sums_[run] = optstate::SumOfSquares(
                SumDTypeOf(piece.parameter),
                store_.sums(piece.parameter, begin), numel);
          });
    });
  }
}

bool StepScheduler::NeedsGradients(uint32_t rank, const Update& update) const {
  if (accumulates()) return false;
  bool needs = false;
  for (const Piece& piece : partitions_[rank].pieces) {
    if (needs || update.updated[piece.parameter] == 0 ||
        !update.HasPushed(rank, piece.parameter)) {
      continue;
    }
    ForEachRun(layout_, piece.parameter, piece.begin, piece.begin + piece.numel,
               [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
                 needs |= options_.recovery.run_stamps[run].load(
                              std::memory_order_relaxed) != update.step;
               });
  }
  return needs;
}

void StepScheduler::ForgetStaged() {
  if (options_.recovery.staged_marks == nullptr) return;
  for (uint64_t run = 0; run < layout_.run_count(); ++run) {
    options_.recovery.staged_marks[run].store(0, std::memory_order_relaxed);
  }
}

void StepScheduler::ForgetStep() {
  for (WorkerUndo& undo : worker_undos()) undo.Clear();
  for (uint64_t run = 0; run < layout_.run_count(); ++run) {
    options_.recovery.run_stamps[run].store(0, std::memory_order_relaxed);
  }
}

}  // namespace optstate
