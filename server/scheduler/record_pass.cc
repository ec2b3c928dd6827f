#include "server/scheduler/record_pass.h"

#include "proto/types/runs.h"

namespace optstate::scheduler {

RecordPass::RecordPass(const StepPlan* plan, const StepMemory* memory)
    : plan_(*plan),
      memory_(*memory),
      wanted_(memory->store->is_resident()
                  ? 0
                  : memory->store->sub_groups().size()) {}

absl::StatusOr<size_t> RecordPass::Begin(const StepUpdate& update) {
  for (size_t i = 0; i < wanted_.size(); ++i) {
    wanted_[i] = IsWanted(memory_.store->sub_groups()[i], update) ? 1 : 0;
  }
  next_.store(0, std::memory_order_relaxed);
  return memory_.store->BeginPass(wanted_);
}

// Returns whether the sub-group has something to update, so that no other is
// read from where it is swapped to.
bool RecordPass::IsWanted(const SubGroup& sub_group,
                          const StepUpdate& update) const {
  bool wanted = false;
  plan_.ForEachParameterIn(
      sub_group, [&](uint32_t p, uint64_t begin, uint64_t end) {
        if (wanted || update.updated[p] == 0) return;
        ForEachRun(plan_.layout(), p, begin, end,
                   [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
                     wanted |= memory_.recovery.run_stamps[run].load(
                                   std::memory_order_relaxed) != update.step;
                   });
      });
  return wanted;
}

}  // namespace optstate::scheduler
