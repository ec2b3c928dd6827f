#include "server/scheduler/record_pass.h"

#include <algorithm>

#include "proto/types/layout.h"
#include "proto/types/runs.h"
#include "proto/types/status_macros.h"

namespace optstate::scheduler {

RecordPass::RecordPass(const StepPlan* plan, const StepMemory* memory,
                       UpdateExecutor* executor)
    : plan_(*plan),
      memory_(*memory),
      executor_(*executor),
      wanted_(memory->store->is_resident()
                  ? 0
                  : memory->store->sub_groups().size()) {
  unopened_.reserve(wanted_.size());
}

absl::StatusOr<size_t> RecordPass::Begin(const StepUpdate& update) {
  unopened_.clear();
  for (size_t i = 0; i < wanted_.size(); ++i) {
    const SubGroup& sub_group = memory_.store->sub_groups()[i];
    const Use use = UseOf(sub_group, update);
    wanted_[i] = use == Use::kWithRecord ? 1 : 0;
    if (use == Use::kWithoutRecord) unopened_.push_back(&sub_group);
  }
  next_.store(0, std::memory_order_relaxed);
  OPTSTATE_ASSIGN_OR_RETURN(const size_t opened,
                            memory_.store->BeginPass(wanted_));
  return unopened_.size() + opened;
}

RecordPass::Use RecordPass::UseOf(const SubGroup& sub_group,
                                  const StepUpdate& update) const {
  Use use = Use::kNone;
  const bool is_durable = memory_.store->is_durable();
  plan_.ForEachParameterIn(
      sub_group, [&](uint32_t p, uint64_t begin, uint64_t end) {
        if (use == Use::kWithRecord || update.updated[p] == 0) return;
        // A commit writes a parameter that is a part of its master with the
        // record, which a pin keeps as it is until then.
        const bool is_written = is_durable && plan_.layout().master_format(p) !=
                                                  MasterFormat::kFloat32;
        ForEachRun(plan_.layout(), p, begin, end,
                   [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
                     if (memory_.recovery.run_stamps[run].load(
                             std::memory_order_relaxed) == update.step) {
                       return;
                     }
                     use = std::max(
                         use, is_written || update.speculative ||
                                      executor_.NeedsRecord(run, update.step)
                                  ? Use::kWithRecord
                                  : Use::kWithoutRecord);
                   });
      });
  return use;
}

}  // namespace optstate::scheduler
