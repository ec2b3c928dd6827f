#include "server/scheduler/passes/step_recovery.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "kernels/undo.h"
#include "proto/types/runs.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/tile_view.h"
#include "storage/format/rank_mark.h"

namespace optstate::scheduler {
namespace {

UndoKind KindOf(const WorkerUndo& undo) {
  return static_cast<UndoKind>(undo.kind.load(std::memory_order_relaxed));
}

size_t FirstNotUpdated(const kernels::UndoSlot& slot) {
  return kernels::InFlightOf(slot.progress.load(std::memory_order_relaxed))
      .begin;
}

absl::Status InAnotherStep(const WorkerUndo& undo, uint64_t step) {
  return absl::DataLossError(
      absl::StrCat("undo: a slot is in the middle of step ", undo.stamp,
                   ", step ", step, " is in progress"));
}

}  // namespace

absl::Status StepRecovery::ImpossibleStateError(const WorkerUndo& undo) const {
  return absl::DataLossError(absl::StrCat(
      "undo: a slot names run ", undo.run, " of ", plan_.layout().run_count(),
      ", kind ", undo.kind.load(std::memory_order_relaxed)));
}

absl::StatusOr<uint64_t> StepRecovery::RollBack(uint64_t step) {
  uint64_t in_flight = 0;
  for (WorkerUndo& undo : memory_.undo) {
    if (KindOf(undo) == UndoKind::kNone) continue;
    OPTSTATE_ASSIGN_OR_RETURN(const bool was_in_flight,
                              RollBackSlot(&undo, step));
    if (was_in_flight) ++in_flight;
  }
  return in_flight;
}

// Returns whether the run that the slot names was in flight.
absl::StatusOr<bool> StepRecovery::RollBackSlot(WorkerUndo* undo,
                                                uint64_t step) {
  const UndoKind kind = KindOf(*undo);
  if (undo->run >= plan_.layout().run_count() ||
      (kind != UndoKind::kUpdate && kind != UndoKind::kAccumulate &&
       kind != UndoKind::kReplace) ||
      (kind == UndoKind::kUpdate && non_separable_ != nullptr)) {
    return ImpossibleStateError(*undo);
  }
  if (kind == UndoKind::kReplace) {
    OPTSTATE_ASSIGN_OR_RETURN(const bool complete,
                              CheckReplacement(undo, step));
    return !complete;
  }
  const std::atomic<uint64_t>* stamps = kind == UndoKind::kAccumulate
                                            ? memory_.recovery.staged_marks
                                            : memory_.recovery.run_stamps;
  // The accumulators are gone since, or the run was done and only its slot was
  // not cleared yet.
  if (stamps == nullptr ||
      stamps[undo->run].load(std::memory_order_relaxed) == undo->stamp) {
    undo->Clear();
    return false;
  }
  if (kind == UndoKind::kUpdate && undo->stamp != step) {
    return InAnotherStep(*undo, step);
  }
  OPTSTATE_RETURN_IF_ERROR(RollBackRun(undo));
  return true;
}

// Checks a complete replacement, which is installed when the step goes on.
// Returns whether it was installed already.
absl::StatusOr<bool> StepRecovery::CheckReplacement(WorkerUndo* undo,
                                                    uint64_t step) {
  const uint32_t parameter = plan_.ParameterOfRun(undo->run);
  if (non_separable_ == nullptr ||
      undo->run != plan_.layout().first_run(parameter)) {
    return ImpossibleStateError(*undo);
  }
  if (non_separable_->IsUpdated(parameter, undo->stamp)) {
    undo->Clear();
    return true;
  }
  if (undo->stamp != step) return InAnotherStep(*undo, step);
  return false;
}

absl::Status StepRecovery::RollBackRun(WorkerUndo* undo) {
  const uint32_t parameter = plan_.ParameterOfRun(undo->run);
  const bool is_accumulating = KindOf(*undo) == UndoKind::kAccumulate;
  absl::Status status;
  plan_.ForEachRunOf(parameter, [&](uint64_t run, uint64_t begin,
                                    uint64_t numel) {
    if (run != undo->run) return;
    status = is_accumulating ? kernels::RollBackSum(
                                   undo->slot, plan_.sum_dtype(parameter),
                                   memory_.store->sums(parameter, begin), numel)
                             : RollBackUpdate(parameter, begin, numel, undo);
  });
  if (status.ok() && is_accumulating) undo->Clear();
  return status;
}

absl::StatusOr<storage::StateStore::Pin> StepRecovery::PinElement(
    uint32_t parameter, uint64_t element) {
  storage::StateStore& store = *memory_.store;
  return store.PinSubGroup(store.sub_groups().IndexOf(parameter, element),
                           storage::StateStore::Access::kWrite);
}

absl::Status StepRecovery::RollBackUpdate(uint32_t parameter, uint64_t begin,
                                          uint64_t numel, WorkerUndo* undo) {
  const Layout& layout = plan_.layout();
  OPTSTATE_ASSIGN_OR_RETURN(const storage::StateStore::Pin pin,
                            PinElement(parameter, begin));
  return kernels::RollBack(
             TileViewOf(layout, pin.record(), parameter, begin, numel),
             *plan_.kernel(parameter).functions, layout.state_format(),
             layout.master_format(parameter), &undo->slot)
      .status();
}

absl::Status StepRecovery::CheckStamps(uint64_t last_step) const {
  for (uint64_t run = 0; run < plan_.layout().run_count(); ++run) {
    const uint64_t stamp =
        memory_.recovery.run_stamps[run].load(std::memory_order_relaxed);
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

// There is one run per worker, so one thread does it.
absl::Status StepRecovery::FinishRunsInFlight(const StepUpdate& update) {
  for (WorkerUndo& undo : memory_.undo) {
    const UndoKind kind = KindOf(undo);
    if (kind == UndoKind::kReplace) {
      OPTSTATE_RETURN_IF_ERROR(InstallReplacement(&undo));
    } else if (kind != UndoKind::kNone) {
      OPTSTATE_RETURN_IF_ERROR(FinishRun(update, &undo));
    }
  }
  return absl::OkStatus();
}

absl::Status StepRecovery::InstallReplacement(WorkerUndo* undo) {
  OPTSTATE_ASSIGN_OR_RETURN(const storage::StateStore::Pin pin,
                            PinElement(plan_.ParameterOfRun(undo->run), 0));
  non_separable_->PutInPlace(pin.record(), undo);
  return absl::OkStatus();
}

absl::Status StepRecovery::FinishRun(const StepUpdate& update,
                                     WorkerUndo* undo) {
  const uint32_t p = plan_.ParameterOfRun(undo->run);
  absl::Status status;
  plan_.ForEachRunOf(p, [&](uint64_t run, uint64_t begin, uint64_t numel) {
    if (run != undo->run) return;
    const auto pin = PinElement(p, begin);
    status = pin.status();
    if (!status.ok()) return;
    FinishElements(update, p, pin->record(), begin, numel, undo);
  });
  return status;
}

// Goes on where the slot says, with the CPU's kernel, whose undo it is.
void StepRecovery::FinishElements(const StepUpdate& update, uint32_t parameter,
                                  const storage::RecordView& record,
                                  uint64_t begin, uint64_t numel,
                                  WorkerUndo* undo) {
  const kernels::UpdateKernel& kernel = *plan_.kernel(parameter).functions;
  const kernels::UpdateFactors factors =
      kernel.prepare(counts_.InputOf(parameter, update));
  GradientAddresses::Buffer buffer;
  for (const PieceTable::Entry& piece : plan_.OwnersOf(parameter)) {
    if (begin < piece.begin || begin >= piece.end) continue;
    kernels::TileView view =
        TileViewOf(plan_.layout(), record, parameter, begin, numel);
    view.gradients =
        addresses_.OfUpdate(parameter, piece, begin, update, &buffer);
    view.begin = FirstNotUpdated(undo->slot);
    view.undo = &undo->slot;
    const uint64_t run = undo->run;
    kernel.apply(factors, view);
    undo->End(&memory_.recovery.run_stamps[run]);
    if (observer_ != nullptr) observer_->OnRunUpdated(update.step, run);
  }
}

int64_t StepRecovery::StagedMicroStep(const Piece& piece,
                                      uint32_t epoch) const {
  int64_t least = -1;
  bool first = true;
  ForEachRun(
      plan_.layout(), piece.parameter, piece.begin, piece.begin + piece.numel,
      [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
        const uint64_t mark =
            memory_.recovery.staged_marks[run].load(std::memory_order_relaxed);
        const int64_t micro_step = storage::EpochOf(mark) == epoch
                                       ? int64_t{storage::MicroStepOf(mark)}
                                       : -1;
        least = first ? micro_step : std::min(least, micro_step);
        first = false;
      });
  return least;
}

void StepRecovery::RestoreSums(absl::Span<const uint32_t> epochs) {
  for (size_t rank = 0; rank < epochs.size(); ++rank) {
    if (epochs[rank] == 0) continue;
    const auto& pieces = plan_.partitions()[rank].pieces;
    executor_.Reduce(
        {0, pieces.size(), pieces.size()},
        [&](size_t i, absl::FunctionRef<void(const ReduceTask&)> visit) {
          const Piece& piece = pieces[i];
          ReduceTask task;
          task.gradient_dtype = plan_.sum_dtype(piece.parameter);
          ForEachRun(plan_.layout(), piece.parameter, piece.begin,
                     piece.begin + piece.numel,
                     [&](uint64_t run, uint64_t begin, uint64_t numel) {
                       const uint64_t mark =
                           memory_.recovery.staged_marks[run].load(
                               std::memory_order_relaxed);
                       if (storage::EpochOf(mark) != epochs[rank]) return;
                       const void* const sum =
                           memory_.store->sums(piece.parameter, begin);
                       task.run = run;
                       task.gradients = absl::MakeConstSpan(&sum, 1);
                       task.numel = numel;
                       task.result = &sums_of_squares_[run];
                       visit(task);
                     });
        });
  }
}

bool StepRecovery::NeedsGradients(uint32_t rank,
                                  const StepUpdate& update) const {
  if (plan_.accumulates()) return false;
  bool needs = false;
  for (const Piece& piece : plan_.partitions()[rank].pieces) {
    if (needs || update.updated[piece.parameter] == 0 ||
        !update.HasPushed(rank, piece.parameter)) {
      continue;
    }
    ForEachRun(plan_.layout(), piece.parameter, piece.begin,
               piece.begin + piece.numel,
               [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
                 needs |= memory_.recovery.run_stamps[run].load(
                              std::memory_order_relaxed) != update.step;
               });
  }
  return needs;
}

void StepRecovery::ForgetStaged() {
  if (memory_.recovery.staged_marks == nullptr) return;
  for (uint64_t run = 0; run < plan_.layout().run_count(); ++run) {
    memory_.recovery.staged_marks[run].store(0, std::memory_order_relaxed);
  }
}

void StepRecovery::ForgetStep() {
  for (WorkerUndo& undo : memory_.undo) undo.Clear();
  for (uint64_t run = 0; run < plan_.layout().run_count(); ++run) {
    memory_.recovery.run_stamps[run].store(0, std::memory_order_relaxed);
  }
}

}  // namespace optstate::scheduler
