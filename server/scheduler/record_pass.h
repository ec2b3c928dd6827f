#ifndef OPTSTATE_SERVER_SCHEDULER_RECORD_PASS_H_
#define OPTSTATE_SERVER_SCHEDULER_RECORD_PASS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// The order in which an update visits the records of a job: each that has
// something to update once, at a position. A swapped record that the executor
// does not need is not opened, so that it is not read for nothing.
//
// Threads: Begin() by one thread; then Pin() by many.
class RecordPass {
 public:
  // The arguments must outlive this object.
  RecordPass(const StepPlan* plan, const StepMemory* memory,
             UpdateExecutor* executor);

  // Begins a pass and ends the one before it. Returns the number of positions.
  absl::StatusOr<size_t> Begin(const StepUpdate& update);
  // Returns the sub-group at a position whose record is not opened; null: it is
  // to be pinned. These come first: a device works on them while the first
  // records are read.
  const SubGroup* Unopened(size_t position) const {
    return position < unopened_.size() ? unopened_[position] : nullptr;
  }
  // Pins the record at another position, for writing, when each position is
  // asked for once. Records that are all in memory are at the position that is
  // named, because each worker has positions of its own, for the sake of the
  // memory on its node; of swapped ones the next is taken, because they are
  // read one after the other.
  absl::StatusOr<storage::StateStore::Pin> Pin(size_t position) {
    return memory_.store->PinOfPass(
        wanted_.empty() ? position
                        : next_.fetch_add(1, std::memory_order_relaxed));
  }

 private:
  enum class Use : uint8_t { kNone, kWithoutRecord, kWithRecord };
  // Returns what the updates of a sub-group use.
  Use UseOf(const SubGroup& sub_group, const StepUpdate& update) const;

  const StepPlan& plan_;
  const StepMemory& memory_;
  UpdateExecutor& executor_;
  std::vector<uint8_t> wanted_;  // by sub-group; empty for a resident store
  std::vector<const SubGroup*> unopened_;
  std::atomic<size_t> next_{0};
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_RECORD_PASS_H_
