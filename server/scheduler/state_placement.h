#ifndef OPTSTATE_SERVER_SCHEDULER_STATE_PLACEMENT_H_
#define OPTSTATE_SERVER_SCHEDULER_STATE_PLACEMENT_H_

#include "absl/status/status.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/workers/worker_placement.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// Moves the state to the nodes whose workers own it, when there are several.
// Returns the first error; memory that could not be moved stays in use where
// it is.
absl::Status MoveStateToNodes(const StepPlan& plan, storage::StateStore* store,
                              const WorkerPlacement& placement);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_STATE_PLACEMENT_H_
