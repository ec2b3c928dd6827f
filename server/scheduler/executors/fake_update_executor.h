#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_FAKE_UPDATE_EXECUTOR_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_FAKE_UPDATE_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/worker_undo.h"

namespace optstate::scheduler {

// An executor as a device is one: it opens positions in another order, holds
// the tasks of several records, does them late and in any order, and closes
// records as they are finished. All choices follow from a seed. The results are
// those of the CPU's kernels. For tests of what relies on no order.
//
// Threads: as UpdateExecutor; makes no threads. Allocates.
class FakeUpdateExecutor final : public UpdateExecutor {
 public:
  // `undo`, which outlives this, serves all tasks.
  FakeUpdateExecutor(WorkerUndo* undo, uint64_t seed)
      : undo_(undo), random_(seed) {}

  // Lets the next Update() fail with `error` after so many tasks; it leaves the
  // others undone.
  void FailAfter(uint64_t tasks, absl::Status error) {
    tasks_until_error_ = tasks;
    error_ = std::move(error);
  }

  absl::Status CanUpdate(const Layout& layout,
                         Accumulation accumulation) const override;
  size_t slots() const override { return kSlots; }
  void Reduce(const IndexRange& positions, ReduceTasks tasks) override;
  absl::Status Update(const IndexRange& positions, UpdateTasks* tasks) override;

 private:
  static constexpr size_t kSlots = 3;

  // A task whose lists are its own.
  struct HeldReduction {
    ReduceTask task;
    std::vector<const void*> gradients;
  };
  struct HeldUpdate {
    size_t slot;
    UpdateTask task;
    std::vector<const void*> gradients;
    kernels::UpdateFactors factors;
  };

  std::vector<size_t> Shuffled(const IndexRange& positions);
  size_t Below(size_t bound) {
    return std::uniform_int_distribution<size_t>(0, bound - 1)(random_);
  }
  absl::Status Open(size_t slot, size_t position, UpdateTasks* tasks);
  // Does one of the tasks that are held.
  absl::Status DoOne(UpdateTasks* tasks);
  void CloseIfDone(size_t slot, UpdateTasks* tasks);

  WorkerUndo* const undo_;
  std::mt19937_64 random_;
  std::optional<uint64_t> tasks_until_error_;
  absl::Status error_;
  std::vector<HeldUpdate> held_;
  std::vector<size_t> free_slots_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_FAKE_UPDATE_EXECUTOR_H_
