#include "server/scheduler/executors/cpu_update_executor.h"

#include "server/observe/trace_recorder.h"
#include "server/scheduler/executors/cpu_tile.h"
#include "server/scheduler/first_error.h"
#include "server/scheduler/step_plan.h"

namespace optstate::scheduler {

absl::Status CpuUpdateExecutor::CanUpdate(const Layout& layout,
                                          Accumulation accumulation) const {
  return StepPlan::CheckKernels(layout, accumulation);
}

void CpuUpdateExecutor::Reduce(const IndexRange& positions, ReduceTasks tasks) {
  pool_.ParallelFor(
      positions,
      [&](size_t position) {
        WorkerUndo* const undo = this->undo();
        tasks(position,
              [undo](const ReduceTask& task) { ReduceOnCpu(task, undo); });
      },
      "staging");
}

absl::Status CpuUpdateExecutor::Update(const IndexRange& positions,
                                       UpdateTasks* tasks) {
  FirstError error;
  pool_.ParallelFor(positions, [&](size_t position) {
    if (error.failed()) return;
    const auto slot = static_cast<size_t>(WorkerPool::CurrentParticipant());
    const absl::Status opened = tasks->Open(slot, position);
    if (!opened.ok()) return error.Note(opened);
    {
      // Between two of these the worker waits for a record, if for anything.
      const observe::ScopedSpan span(pool_.trace(), "update");
      WorkerUndo* const undo = this->undo();
      tasks->ForEachTask(slot, [&](UpdateTask& task) {
        UpdateOnCpu(task, undo);
        if (observer_ == nullptr || task.whole != nullptr) return;
        observer_->OnRunUpdated(task.step, task.run);
      });
    }
    tasks->Close(slot);
  });
  return error.status();
}

}  // namespace optstate::scheduler
