#include "server/scheduler/passes/speculation.h"

#include "kernels/cast.h"
#include "proto/types/runs.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/element_ranges.h"
#include "storage/persist_in_order.h"

namespace optstate::scheduler {

bool Speculation::CanSpeculate(const Layout& layout) {
  return kernels::FindWholeKernel(layout.optimizer()) == nullptr;
}

Speculation::Speculation(const StepPlan* plan, const StepMemory* memory,
                         WorkerPool* pool)
    : plan_(*plan), memory_(*memory), pool_(*pool) {
  // A file of a former shape, which this one does not use, may be smaller.
  if (memory->speculation.size() >= Bytes(plan->layout())) {
    keeper_.emplace(&plan->layout(), memory->speculation);
  }
}

// Does not begin an epoch of the keeper: a step is speculated about several
// times, and what is kept of it counts, also after the engine's death.
void Speculation::Begin(uint64_t step) {
  memory_.control->step_speculated.store(step, std::memory_order_relaxed);
  storage::PersistInOrder(storage::PersistPoint::kStepSpeculated);
}

// Repairs what depends on a run's restored master, and says that the run lacks
// the update.
void Speculation::RepairRun(const storage::RecordView& record, const Run& run) {
  const Layout& layout = plan_.layout();
  if (layout.master_format(run.parameter) == MasterFormat::kFloat32) {
    kernels::CastFromFloat(
        layout.parameters()[run.parameter].dtype,
        reinterpret_cast<const float*>(record.master(run.parameter, run.begin)),
        record.parameter(run.parameter, run.begin), run.numel);
  }
  storage::PersistInOrder(storage::PersistPoint::kRolledBackStamp);
  memory_.recovery.run_stamps[run.run].store(0, std::memory_order_relaxed);
}

absl::Status Speculation::RollBack(uint64_t step) {
  // After a crash, whole runs are restored, so an update in flight is dropped.
  // A sum in flight is rolled back by itself.
  for (WorkerUndo& undo : memory_.undo) {
    if (undo.kind.load(std::memory_order_relaxed) !=
        static_cast<uint64_t>(UndoKind::kAccumulate)) {
      undo.Clear();
    }
  }
  OPTSTATE_RETURN_IF_ERROR(ForEachElementRange(
      plan_, memory_.store, &pool_, 0, storage::StateStore::Access::kWrite,
      [&](const storage::RecordView& record, uint32_t p, uint64_t begin,
          uint64_t end) {
        ForEachRun(plan_.layout(), p, begin, end,
                   [&](uint64_t run, uint64_t run_begin, uint64_t numel) {
                     const Run kept = {run, p, run_begin, numel};
                     keeper_->RollBackRun(record, step, kept,
                                          [&] { RepairRun(record, kept); });
                   });
      }));
  storage::PersistInOrder(storage::PersistPoint::kSpeculationOver);
  memory_.control->step_speculated.store(0, std::memory_order_relaxed);
  return absl::OkStatus();
}

void Speculation::Forget() {
  memory_.control->step_speculated.store(0, std::memory_order_relaxed);
  if (keeper_.has_value()) keeper_->ForgetAll();
}

}  // namespace optstate::scheduler
