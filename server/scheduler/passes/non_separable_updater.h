#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_NON_SEPARABLE_UPDATER_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_NON_SEPARABLE_UPDATER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/layout.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/gradient_addresses.h"
#include "server/scheduler/record_pass.h"
#include "server/scheduler/step_counts.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/record_view.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// The pass of a step whose optimizer needs a whole parameter at once. An
// executor has each parameter as one task, and updates it by the CPU's kernel,
// which is here, or by a device's.
//
// Nothing is rolled back here: all new values of a parameter are made beside
// the old ones, as floats in the worker's part of the `redo` file, and only
// when they are complete does the worker's slot say so (kReplace). From then on
// they are installed, in the formats of the job, as often as need be: each time
// the same bytes, random ones included, for only `redo` and the step are read.
// Before that, a later process begins anew. What a device has computed goes the
// same way, so that one that fails has changed nothing. On the CPU a parameter
// is one worker's work, so workers wait for one that is much larger than the
// others.
//
// Threads: one caller at a time; the executor's threads call the overrides.
class NonSeparableUpdater final : private UpdateTasks {
 public:
  // Returns the bytes of the redo file; 0: the optimizer needs none.
  static uint64_t RedoBytes(const Layout& layout, int workers);
  // Returns the bytes that the redo file of an engine that died must have for
  // the runs that its undo slots name.
  static uint64_t RedoBytesInUse(const Layout& layout,
                                 absl::Span<const std::byte> undo);
  // Returns the bytes of the process's own memory that Init() takes; 0: the
  // optimizer needs none.
  static uint64_t WorkspaceBytes(const Layout& layout, int workers);

  // All outlive this; `observer` may be null. The plan's optimizer has a
  // non-separable update. `pool` is the executor's.
  NonSeparableUpdater(const StepPlan* plan, const StepMemory* memory,
                      WorkerPool* pool, UpdateExecutor* executor,
                      const StepCounts* counts, StepObserver* observer);
  // Takes the workspace; to be called once, before all else.
  // RESOURCE_EXHAUSTED when there is no memory for it.
  absl::Status Init();

  // Updates the parameters that do not have the step's stamp. An error is one
  // of the store or the executor; the same call, of this or a later process,
  // does the rest.
  absl::Status MakePass(const StepUpdate& update);

  // Returns whether all of a parameter has the step.
  bool IsUpdated(uint32_t parameter, uint64_t step) const;
  // Installs the new values of the parameter that the slot names. Idempotent: a
  // crash in here repeats it.
  void PutInPlace(const storage::RecordView& record, WorkerUndo* undo);

 private:
  // The record of an open slot, on cache lines of its own.
  class alignas(64) Slot final : public WholeRecord {
   public:
    void SetUpdater(NonSeparableUpdater* updater) { updater_ = updater; }
    void Open(storage::StateStore::Pin pin) { pin_.emplace(std::move(pin)); }
    void Close() { pin_.reset(); }
    const storage::RecordView& record() const { return pin_->record(); }

    WholeParameter Describe(uint32_t parameter) const override {
      return updater_->Describe(parameter);
    }
    void Gather(uint32_t parameter, const WholeArrays& to) const override {
      updater_->Gather(record(), parameter, to);
    }
    void WriteBack(uint32_t parameter, const WholeArrays& from) override {
      updater_->WriteBack(record(), parameter, from);
    }
    void Update(uint32_t parameter) override {
      updater_->UpdateParameter(record(), parameter);
    }

   private:
    NonSeparableUpdater* updater_ = nullptr;
    std::optional<storage::StateStore::Pin> pin_;
  };

  absl::Status Open(size_t slot, size_t position) override;
  void ForEachTask(size_t slot,
                   absl::FunctionRef<void(UpdateTask&)> visit) override;
  void Close(size_t slot) override { slots_[slot].Close(); }

  // See WholeRecord.
  WholeParameter Describe(uint32_t parameter) const;
  void Gather(const storage::RecordView& record, uint32_t parameter,
              const WholeArrays& to) const;
  void WriteBack(const storage::RecordView& record, uint32_t parameter,
                 const WholeArrays& from);
  void UpdateParameter(const storage::RecordView& record, uint32_t parameter);
  void GatherGradient(uint32_t parameter, float* out) const;
  // Lets the slot of the worker that calls name a parameter whose new values
  // are complete, and installs them.
  void Replace(const storage::RecordView& record, uint32_t parameter,
               WorkerUndo* undo);
  // Returns the slot of the worker that calls.
  WorkerUndo& undo() const {
    return memory_.undo[static_cast<size_t>(WorkerPool::CurrentParticipant())];
  }
  size_t WorkerOf(const WorkerUndo& undo) const {
    return static_cast<size_t>(&undo - memory_.undo.data());
  }
  // Returns the worker's part of the redo file.
  std::byte* RedoOf(const WorkerUndo& undo) const {
    return memory_.redo.data() + WorkerOf(undo) * redo_bytes_;
  }

  const StepPlan& plan_;
  const StepMemory& memory_;
  WorkerPool& pool_;
  UpdateExecutor& executor_;
  const StepCounts& counts_;
  StepObserver* const observer_;
  const GradientAddresses addresses_;
  RecordPass pass_;
  kernels::UpdateKernelKey key_;  // names the optimizer
  const std::unique_ptr<Slot[]> slots_;
  const StepUpdate* update_ = nullptr;  // of the pass
  const uint64_t redo_bytes_;           // per worker
  const uint64_t workspace_elements_;   // per worker
  std::unique_ptr<float, decltype(&std::free)> workspace_{nullptr, &std::free};
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_NON_SEPARABLE_UPDATER_H_
