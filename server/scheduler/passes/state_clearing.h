#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_STATE_CLEARING_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_STATE_CLEARING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/workers/worker_pool.h"

namespace optstate::scheduler {

// Zeroes masters, state arrays, scales, counts and numbers of parameters
// [first_parameter, count). Records without other parameters are not read, so a
// damaged one is no error. Returns the first error of the store.
absl::Status ClearState(const StepPlan& plan, const StepMemory& memory,
                        WorkerPool* pool, uint32_t first_parameter);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_STATE_CLEARING_H_
