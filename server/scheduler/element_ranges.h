#ifndef OPTSTATE_SERVER_SCHEDULER_ELEMENT_RANGES_H_
#define OPTSTATE_SERVER_SCHEDULER_ELEMENT_RANGES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "server/scheduler/first_error.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// Calls visit(record, parameter, begin, end), on the workers of the pool, for
// all elements of parameters [first_parameter, count), pinned for writing, or,
// with kOverwrite, in records without other parameters, for that.
// Returns the first error of the store; some elements are not visited then.
template <typename Visitor>
absl::Status ForEachElementRange(const StepPlan& plan,
                                 storage::StateStore* store, WorkerPool* pool,
                                 uint32_t first_parameter,
                                 storage::StateStore::Access access,
                                 const Visitor& visit) {
  FirstError error;
  pool->ParallelFor(store->sub_groups().size(), [&](size_t i) {
    const SubGroup& range = store->sub_groups()[i];
    if (range.end_parameter <= first_parameter || error.failed()) return;
    const auto pin =
        store->PinSubGroup(i, range.first_parameter < first_parameter
                                  ? storage::StateStore::Access::kWrite
                                  : access);
    if (!pin.ok()) return error.Note(pin.status());
    plan.ForEachParameterIn(range,
                            [&](uint32_t p, uint64_t begin, uint64_t end) {
                              if (p < first_parameter) return;
                              visit(pin->record(), p, begin, end);
                            });
  });
  return error.status();
}

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_ELEMENT_RANGES_H_
