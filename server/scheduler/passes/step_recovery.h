#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_STEP_RECOVERY_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_STEP_RECOVERY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/partition.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/gradient_addresses.h"
#include "server/scheduler/passes/non_separable_updater.h"
#include "server/scheduler/step_counts.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "server/scheduler/worker_undo.h"

namespace optstate::scheduler {

// Repairs what a process that died left of a step: brings the state to a point
// where each run has all of an update, or a push, or nothing of it, so that a
// step or a staging that is repeated does the rest.
//
// Threads: one caller at a time.
class StepRecovery {
 public:
  // All outlive this. `non_separable` is null for a plan without such updates;
  // `observer` may be null. `sums_of_squares` has one number for each run.
  StepRecovery(const StepPlan* plan, const StepMemory* memory,
               UpdateExecutor* executor, const StepCounts* counts,
               NonSeparableUpdater* non_separable,
               absl::Span<double> sums_of_squares, StepObserver* observer)
      : plan_(*plan),
        memory_(*memory),
        executor_(*executor),
        counts_(*counts),
        non_separable_(non_separable),
        sums_of_squares_(sums_of_squares),
        observer_(observer),
        addresses_(plan, memory->store) {}

  // Rolls back what a process that died was writing, in any number of slots: in
  // runs of the update of `step` (0: no step is in progress) the vectors in
  // flight (FinishRunsInFlight() finishes those with a kept xor), in pushes the
  // whole run. Returns the number of runs that were in flight. DATA_LOSS when a
  // slot is impossible.
  absl::StatusOr<uint64_t> RollBack(uint64_t step);
  // Finishes runs in the slots that name them, so that a process which dies
  // here leaves what it found, and before the workers take slots anew.
  absl::Status FinishRunsInFlight(const StepUpdate& update);
  // Returns DATA_LOSS when a run is stamped with a step after `last_step`, the
  // last that can have begun: the update of that step would leave the run out.
  absl::Status CheckStamps(uint64_t last_step) const;

  // Recomputes the sums of squares of what is accumulated under these epochs
  // (one per rank; 0: the rank has staged nothing).
  void RestoreSums(absl::Span<const uint32_t> epochs);
  // Returns the micro-step up to which a piece is accumulated under this epoch,
  // or -1: the least of its runs. A piece without elements has -1.
  int64_t StagedMicroStep(const Piece& piece, uint32_t epoch) const;
  // Returns whether the update needs gradients that lie in the rank's area.
  bool NeedsGradients(uint32_t rank, const StepUpdate& update) const;

  // Clears the stamps of all runs and the undo slots, before the state is
  // loaded anew.
  void ForgetStep();
  // Clears the marks of what is accumulated, before runs change hands between
  // ranks.
  void ForgetStaged();

 private:
  absl::Status ImpossibleStateError(const WorkerUndo& undo) const;
  absl::StatusOr<bool> CheckReplacement(WorkerUndo* undo, uint64_t step);
  absl::StatusOr<bool> RollBackSlot(WorkerUndo* undo, uint64_t step);
  absl::Status RollBackRun(WorkerUndo* undo);
  absl::Status RollBackUpdate(uint32_t parameter, uint64_t begin,
                              uint64_t numel, WorkerUndo* undo);
  absl::Status InstallReplacement(WorkerUndo* undo);
  absl::Status FinishRun(const StepUpdate& update, WorkerUndo* undo);
  void FinishElements(const StepUpdate& update, uint32_t parameter,
                      const storage::RecordView& record, uint64_t begin,
                      uint64_t numel, WorkerUndo* undo);
  absl::StatusOr<storage::StateStore::Pin> PinElement(uint32_t parameter,
                                                      uint64_t element);

  const StepPlan& plan_;
  const StepMemory& memory_;
  UpdateExecutor& executor_;
  const StepCounts& counts_;
  NonSeparableUpdater* const non_separable_;
  const absl::Span<double> sums_of_squares_;
  StepObserver* const observer_;
  const GradientAddresses addresses_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_STEP_RECOVERY_H_
