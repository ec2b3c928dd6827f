#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_UPDATE_EXECUTOR_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_UPDATE_EXECUTOR_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"

namespace optstate::scheduler {

// The executor of the CPU: each worker of a pool opens the positions that it
// owns, one after the other, and does the tasks of each at once, in their
// order, so that a slot is a worker and nothing is copied.
class CpuUpdateExecutor final : public UpdateExecutor {
 public:
  // All outlive this. `undo` has a slot for each participant of the pool, or
  // none when no task needs any. `observer` may be null.
  CpuUpdateExecutor(WorkerPool* pool, absl::Span<WorkerUndo> undo,
                    StepObserver* observer)
      : pool_(*pool), undo_(undo), observer_(observer) {}

  absl::Status CanUpdate(const Layout& layout,
                         Accumulation accumulation) const override;
  size_t slots() const override {
    return static_cast<size_t>(pool_.participants());
  }
  void Reduce(const IndexRange& positions, ReduceTasks tasks) override;
  absl::Status Update(const IndexRange& positions, UpdateTasks* tasks) override;

 private:
  // Returns the slot of the worker that calls.
  WorkerUndo* undo() const {
    return undo_.data() + WorkerPool::CurrentParticipant();
  }

  WorkerPool& pool_;
  const absl::Span<WorkerUndo> undo_;
  StepObserver* const observer_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_UPDATE_EXECUTOR_H_
