#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_NON_SEPARABLE_UPDATER_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_NON_SEPARABLE_UPDATER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/layout.h"
#include "server/scheduler/gradient_addresses.h"
#include "server/scheduler/record_pass.h"
#include "server/scheduler/step_counts.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/record_view.h"

namespace optstate::scheduler {

// The pass of a step whose optimizer needs a whole parameter at once.
//
// Nothing is rolled back here: all new values of a parameter are made beside
// the old ones, as floats in the worker's part of the `redo` file, and only
// when they are complete does the worker's slot say so (kReplace). From then on
// they are installed, in the formats of the job, as often as need be: each time
// the same bytes, random ones included, for only `redo` and the step are read.
// Before that, a later process begins anew. A parameter is one worker's work,
// so workers wait for one that is much larger than the others.
//
// Threads: one caller at a time.
class NonSeparableUpdater {
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
  // non-separable update.
  NonSeparableUpdater(const StepPlan* plan, const StepMemory* memory,
                      WorkerPool* pool, const StepCounts* counts,
                      StepObserver* observer);
  // Takes the workspace; to be called once, before all else.
  // RESOURCE_EXHAUSTED when there is no memory for it.
  absl::Status Init();

  // Updates the parameters that do not have the step's stamp. An error is one
  // of the store; the same call, of this or a later process, does the rest.
  absl::Status MakePass(const StepUpdate& update);

  // Returns whether all of a parameter has the step.
  bool IsUpdated(uint32_t parameter, uint64_t step) const;
  // Installs the new values of the parameter that the slot names. Idempotent: a
  // crash in here repeats it.
  void PutInPlace(const storage::RecordView& record, WorkerUndo* undo);

 private:
  void UpdateRecord(const storage::RecordView& record,
                    const StepUpdate& update);
  void UpdateParameter(const storage::RecordView& record, uint32_t parameter,
                       const StepUpdate& update);
  void GatherGradient(uint32_t parameter, const StepUpdate& update, float* out);
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
  const StepCounts& counts_;
  StepObserver* const observer_;
  const GradientAddresses addresses_;
  RecordPass pass_;
  const uint64_t redo_bytes_;          // per worker
  const uint64_t workspace_elements_;  // per worker
  std::unique_ptr<float, decltype(&std::free)> workspace_{nullptr, &std::free};
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_NON_SEPARABLE_UPDATER_H_
