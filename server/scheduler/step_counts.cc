#include "server/scheduler/step_counts.h"

#include <atomic>

#include "storage/persist_in_order.h"

namespace optstate::scheduler {

kernels::UpdateInput StepCounts::InputOf(uint32_t parameter,
                                         const StepUpdate& update) const {
  const storage::StateStore& store = *memory_.store;
  const GroupUpdate& group =
      update.groups[plan_.layout().parameters()[parameter].group];
  kernels::UpdateInput input;
  input.hyperparams = group.hyperparams;
  input.step_count = store.step_counts()[parameter] + 1;
  input.gradient_factor = group.gradient_factor;
  input.gradient_limit = update.gradient_limit;
  input.step = update.step;
  if (plan_.non_separable_kernel() != nullptr) return input;
  const kernels::UpdateKernel& kernel = *plan_.kernel(parameter).functions;
  if (kernel.advance != nullptr) {
    const double before = input.step_count == 1
                              ? plan_.layout().optimizer_info().scalar_initial
                              : store.scalars()[parameter];
    input.scalar = kernel.advance(input.hyperparams, input.step_count, before);
  }
  return input;
}

void StepCounts::Count(const StepUpdate& update) {
  // Loads the hook once: loads for each parameter would be a quarter of the
  // time of a loop as short as this one.
  const storage::PersistHook hook =
      storage::persist_hook.load(std::memory_order_relaxed);
  storage::ControlFile& control = *memory_.control;
  int64_t* const counts = memory_.store->step_counts().data();
  double* const scalars = memory_.store->scalars().data();
  uint64_t p = control.counts_begun.load(std::memory_order_relaxed);
  if (p != 0) {
    --p;
    counts[p] = control.count_before[p % 2];
    if (scalars != nullptr) scalars[p] = control.scalar_before[p % 2];
  }
  for (; p < update.updated.size(); ++p) {
    control.count_before[p % 2] = counts[p];
    if (scalars != nullptr) control.scalar_before[p % 2] = scalars[p];
    storage::PersistInOrder(storage::PersistPoint::kCountsBegun, hook);
    control.counts_begun.store(p + 1, std::memory_order_relaxed);
    storage::PersistInOrder(storage::PersistPoint::kStepCount, hook);
    if (update.updated[p] == 0) continue;
    if (scalars != nullptr) scalars[p] = InputOf(p, update).scalar;
    ++counts[p];
  }
  storage::PersistInOrder(storage::PersistPoint::kAllStepCounts, hook);
}

}  // namespace optstate::scheduler
