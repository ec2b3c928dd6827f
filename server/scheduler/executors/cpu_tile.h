#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_TILE_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_TILE_H_

#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/worker_undo.h"

namespace optstate::scheduler {

// Does a task with the CPU's kernels. `undo` is a slot that no other thread
// uses; it may be null when the task needs none.
//
// Threads: thread-safe for different tasks and slots.
void ReduceOnCpu(const ReduceTask& task, WorkerUndo* undo);
void UpdateOnCpu(UpdateTask& task, WorkerUndo* undo);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_TILE_H_
