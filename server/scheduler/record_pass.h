#ifndef OPTSTATE_SERVER_SCHEDULER_RECORD_PASS_H_
#define OPTSTATE_SERVER_SCHEDULER_RECORD_PASS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// The order in which an update visits the records of a job: each that has
// something to update once, at a position.
//
// Threads: Begin() by one thread; then Pin() by many.
class RecordPass {
 public:
  // The arguments must outlive this object.
  RecordPass(const StepPlan* plan, const StepMemory* memory);

  // Begins a pass and ends the one before it. Returns the number of positions.
  absl::StatusOr<size_t> Begin(const StepUpdate& update);
  // Pins the record at a position, for writing, when each position is asked for
  // once. Records that are all in memory are at the position that is named,
  // because each worker has positions of its own, for the sake of the memory on
  // its node; of swapped ones the next is taken, because they are read one
  // after the other.
  absl::StatusOr<storage::StateStore::Pin> Pin(size_t position) {
    return memory_.store->PinOfPass(
        wanted_.empty() ? position
                        : next_.fetch_add(1, std::memory_order_relaxed));
  }

 private:
  bool IsWanted(const SubGroup& sub_group, const StepUpdate& update) const;

  const StepPlan& plan_;
  const StepMemory& memory_;
  std::vector<uint8_t> wanted_;  // by sub-group; empty for a resident store
  std::atomic<size_t> next_{0};
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_RECORD_PASS_H_
