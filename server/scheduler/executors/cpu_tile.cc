#include "server/scheduler/executors/cpu_tile.h"

#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "storage/persist_in_order.h"

namespace optstate::scheduler {
namespace {

void AddToSum(const ReduceTask& task, WorkerUndo* undo) {
  const SumTarget& sum = task.sum;
  if (sum.is_first) {
    // This overwrites values that no longer count; if interrupted, it is
    // repeated.
    kernels::Accumulate(task.gradient_dtype, task.gradients, /*first=*/true,
                        sum.dtype, sum.data, task.numel);
    storage::PersistInOrder(storage::PersistPoint::kStagedMark);
    sum.mark->store(sum.mark_value, std::memory_order_relaxed);
    return;
  }
  undo->Begin(UndoKind::kAccumulate, task.run, sum.mark_value);
  kernels::Accumulate(task.gradient_dtype, task.gradients, /*first=*/false,
                      sum.dtype, sum.data, task.numel, &undo->slot);
  undo->End(sum.mark);
}

}  // namespace

void ReduceOnCpu(const ReduceTask& task, WorkerUndo* undo) {
  if (task.sum.data == nullptr) {
    *task.result = kernels::Reduce(task.reduction, task.gradient_dtype,
                                   task.gradients, task.numel);
    return;
  }
  AddToSum(task, undo);
  // Reduces the sum while it is in the cache.
  const void* const sum = task.sum.data;
  *task.result = kernels::Reduce(task.reduction, task.sum.dtype,
                                 absl::MakeConstSpan(&sum, 1), task.numel);
}

void UpdateOnCpu(UpdateTask& task, WorkerUndo* undo) {
  if (task.whole != nullptr) {
    task.whole->Update(task.parameter);
    return;
  }
  if (task.undo == UndoPolicy::kNone) {
    task.view.undo = nullptr;
    task.kernel->apply(*task.factors, task.view);
    task.stamp->store(task.step, std::memory_order_release);
    return;
  }
  undo->Begin(UndoKind::kUpdate, task.run, task.step);
  task.view.undo = &undo->slot;
  task.kernel->apply(*task.factors, task.view);
  undo->End(task.stamp);
}

}  // namespace optstate::scheduler
