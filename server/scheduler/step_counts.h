#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_COUNTS_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_COUNTS_H_

#include <cstdint>

#include "kernels/update_kernel.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"

namespace optstate::scheduler {

// Counts how often each parameter was updated, and has the number that some
// optimizers keep for each: what an update reads of them, and how they move on.
//
// Threads: InputOf() by many while nothing is counted; Count() by one.
class StepCounts {
 public:
  // The arguments must outlive this object.
  StepCounts(const StepPlan* plan, const StepMemory* memory)
      : plan_(*plan), memory_(*memory) {}

  // Returns what prepares the kernel of a parameter for this step, which is not
  // counted yet.
  kernels::UpdateInput InputOf(uint32_t parameter,
                               const StepUpdate& update) const;
  // Counts the step for the parameters that it updates. If interrupted
  // anywhere, the count is resumed by the same call: see ControlFile.
  void Count(const StepUpdate& update);

 private:
  const StepPlan& plan_;
  const StepMemory& memory_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_COUNTS_H_
