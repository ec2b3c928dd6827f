#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_LOG_REPLAY_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_LOG_REPLAY_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/scheduler/gradient_log.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/workers/worker_pool.h"

namespace optstate::scheduler {

// Brings the records in host memory up to date whose newest copies were on
// devices of a process that died: each run then has the step of its stamp, as
// if it had been updated there. Finishes the runs that a process died in while
// it did the same. Comes before all else that an engine does with a job's
// records. DATA_LOSS: the log is damaged, or lacks a step.
absl::Status ReplayLog(const StepPlan& plan, const StepMemory& memory,
                       GradientLog* log, WorkerPool* pool);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_LOG_REPLAY_H_
