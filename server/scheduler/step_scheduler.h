#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/passes/gradient_norms.h"
#include "server/scheduler/passes/gradient_stager.h"
#include "server/scheduler/passes/non_separable_updater.h"
#include "server/scheduler/passes/speculation.h"
#include "server/scheduler/passes/step_recovery.h"
#include "server/scheduler/passes/updater.h"
#include "server/scheduler/piece_table.h"
#include "server/scheduler/step_counts.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_placement.h"
#include "server/scheduler/workers/worker_pool.h"

namespace optstate::scheduler {

// Orders the arithmetic of a job's steps: statistics and accumulation as
// gradients arrive, the update when the step is decided. Knows no rules: the
// session decides which rank may push what when. Computes nothing: an
// UpdateExecutor does. Owns the objects that do the parts of it, each of which
// says more; all of them read one StepPlan.
//
// Bits: independent of threads, sub-groups, partition and world size. Each
// element is computed by itself; the sum of squares is taken within runs in the
// kernels' order, then over the runs of each parameter, then over parameters.
// Crashes: a process that dies in Stage or Apply leaves state that RollBack
// brings to a point where each run has all of an update, or a push, or nothing
// of it; the same call then does the rest.
// Trust: gradients are arithmetic input. A peer that changes them between
// staging and update gets another sum, and no address or size depends on them.
//
// Threads: one caller at a time. Allocates only in Create and SetPartitions.
// Size: it forwards one call to one room each.
class StepScheduler {
 public:
  struct Options {
    storage::StateStore* store = nullptr;  // outlives this, with its layout
    uint64_t grain_elements = 0;           // see SubGroupTable; 0: the default
    storage::RecoveryArrays recovery;      // valid as long as this
    storage::ControlFile* control = nullptr;  // "
    // WorkerUndoBytes(pool->participants()), zeroed or from a former engine.
    absl::Span<std::byte> undo;
    // RedoBytes(*layout, pool->participants()), likewise.
    absl::Span<std::byte> redo;
    // SpeculationBytes(*layout), likewise; empty: no speculation.
    absl::Span<std::byte> speculation;
    // The log of a former engine, whose records are brought up to date (see
    // ReplayLog); empty: there is none.
    absl::Span<std::byte> gradient_log;
    WorkerPool* pool = nullptr;
    UpdateExecutor* executor = nullptr;  // null: the CPU's, on `pool`
    StepObserver* observer = nullptr;    // tests only
  };

  using GroupUpdate = scheduler::GroupUpdate;
  using Update = StepUpdate;
  using Staging = StagingRequest;

  // See StepPlan.
  static absl::Status CheckKernels(const Layout& layout,
                                   Accumulation accumulation) {
    return StepPlan::CheckKernels(layout, accumulation);
  }
  // Creates a scheduler. With accumulators, gradients are summed as they are
  // staged, those of several ranks in fp32 first, and the update takes the
  // sums. UNIMPLEMENTED when the executor cannot update the layout; DATA_LOSS
  // when the log is damaged.
  static absl::StatusOr<std::unique_ptr<StepScheduler>> Create(
      const Options& options);

  // See MoveStateToNodes().
  absl::Status MoveToNodes(const WorkerPlacement& placement);

  // See StepPlan.
  void SetPartitions(absl::Span<const RankPartition> partitions,
                     bool replicated) {
    plan_->SetPartitions(partitions, replicated);
  }
  const PieceTable& pieces() const { return plan_->pieces(); }
  uint64_t UpdateBytes(absl::Span<const uint8_t> updated) const {
    return plan_->UpdateBytes(updated);
  }

  // Returns the bytes of the undo file for this many workers.
  static uint64_t WorkerUndoBytes(int workers) {
    return static_cast<uint64_t>(workers) * sizeof(WorkerUndo);
  }
  // See NonSeparableUpdater.
  static uint64_t RedoBytes(const Layout& layout, int workers) {
    return NonSeparableUpdater::RedoBytes(layout, workers);
  }
  static uint64_t WorkspaceBytes(const Layout& layout, int workers) {
    return NonSeparableUpdater::WorkspaceBytes(layout, workers);
  }
  static uint64_t RedoBytesInUse(const Layout& layout,
                                 absl::Span<const std::byte> undo) {
    return NonSeparableUpdater::RedoBytesInUse(layout, undo);
  }

  // See StepRecovery.
  absl::StatusOr<uint64_t> RollBack(uint64_t step) {
    return recovery_.RollBack(step);
  }
  absl::Status CheckStamps(uint64_t last_step) const {
    return recovery_.CheckStamps(last_step);
  }
  void RestoreSums(absl::Span<const uint32_t> epochs) {
    recovery_.RestoreSums(epochs);
  }
  int64_t StagedMicroStep(const Piece& piece, uint32_t epoch) const {
    return recovery_.StagedMicroStep(piece, epoch);
  }
  bool NeedsGradients(uint32_t rank, const Update& update) const {
    return recovery_.NeedsGradients(rank, update);
  }
  // `is_whole`: all records are going to be cleared, so that nothing that one
  // lacks counts. Else an error is one of the store, and nothing is forgotten.
  absl::Status ForgetStep(bool is_whole);
  void ForgetStaged() { recovery_.ForgetStaged(); }

  // See GradientStager.
  void Stage(const Staging& staging) { stager_.Stage(staging); }

  // See GradientNorms.
  double SumOfSquares(absl::Span<const uint8_t> updated,
                      absl::Span<double> by_group) const {
    return norms_.SumOfSquares(updated, by_group);
  }
  double SumOfSquaresOf(uint32_t parameter) const {
    return norms_.SumOfSquaresOf(parameter);
  }
  void NormsByParameter(absl::Span<const uint8_t> updated,
                        absl::Span<double> norms) const {
    norms_.NormsByParameter(updated, norms);
  }
  double Norm(double type, const Update& update) {
    return norms_.Norm(type, update);
  }

  // Makes one fused pass over the state of the updated parameters; writes the
  // parameter area and counts the step for each parameter. An error is one of
  // the store or the executor: a part of the runs has the step, and the same
  // call, of this or a later process, does the rest.
  absl::Status Apply(const Update& update);

  // Brings all records up to date, so that a commit has them as they are after
  // the last step. See CatchUpRecords().
  absl::Status CatchUp();
  // Brings some of the records up to date that the next pass would. Returns
  // whether there are more. Nothing while records would have to be waited for.
  bool WorkAhead();

  // See Speculation.
  static bool CanSpeculate(const Layout& layout) {
    return Speculation::CanSpeculate(layout);
  }
  static uint64_t SpeculationBytes(const Layout& layout) {
    return Speculation::Bytes(layout);
  }
  // Applies the known part of an undecided step, and keeps the overwritten
  // values; an Apply() of the same step does the rest. Counts no step.
  absl::Status Speculate(Update update);
  // Rolls back all that was speculated about the step.
  absl::Status RollBackSpeculation(uint64_t step) {
    return speculation_.RollBack(step);
  }
  void ForgetSpeculation() { speculation_.Forget(); }

  // Zeroes all state of parameters [first, count).
  absl::Status ClearState(uint32_t first_parameter);

 private:
  StepScheduler(const Options& options, std::unique_ptr<StepPlan> plan,
                std::unique_ptr<UpdateExecutor> executor);
  absl::Status MakePass(const Update& update);

  const StepMemory memory_;
  WorkerPool& pool_;
  StepObserver* const observer_;
  const std::unique_ptr<StepPlan> plan_;
  const std::unique_ptr<UpdateExecutor> own_executor_;  // null: another's
  UpdateExecutor& executor_;
  StepCounts counts_;
  GradientNorms norms_;
  GradientStager stager_;
  Speculation speculation_;
  Updater updater_;
  std::optional<NonSeparableUpdater> non_separable_;
  StepRecovery recovery_;
  size_t next_ahead_ = 0;  // sub-group
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_
