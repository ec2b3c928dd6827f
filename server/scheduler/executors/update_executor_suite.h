#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_EXECUTOR_SUITE_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_EXECUTOR_SUITE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"

namespace optstate::scheduler {

struct UpdateExecutorParam {
  std::string name;
  int workers = 1;  // of the pool, and slots in `undo`
  std::unique_ptr<UpdateExecutor> (*make)(WorkerPool* pool,
                                          absl::Span<WorkerUndo> undo);
  // Returns why there is none on this machine, and its tests are skipped;
  // empty: there is.
  std::string (*why_not)() = nullptr;
};
inline void PrintTo(const UpdateExecutorParam& param, std::ostream* out) {
  *out << param.name;
}

// Updates over arrays of floats, `kRuns` runs at each position, and a watch on
// how an executor uses them.
class WatchedUpdates final : public UpdateTasks {
 public:
  static constexpr size_t kPositions = 17;
  static constexpr size_t kRuns = 3;
  // The elements of a run: no multiple of any vector.
  static constexpr size_t kNumel = 101;
  static constexpr uint64_t kStep = 9;

  // `slots` is the executor's.
  explicit WatchedUpdates(size_t slots);

  // Lets Open() fail at a position.
  void FailAt(size_t position) { failing_position_ = position; }
  void SetUndo(UndoPolicy undo) { undo_ = undo; }
  // Begins anew, with the values before any update.
  void Reset();

  absl::Status Open(size_t slot, size_t position) override;
  void ForEachTask(size_t slot,
                   absl::FunctionRef<void(UpdateTask&)> visit) override;
  void Close(size_t slot) override;

  // Returns how often each position was opened.
  const std::vector<int>& opened() const { return opened_; }
  size_t open_slots() const;
  bool IsStamped(size_t run) const { return stamps_[run].load() == kStep; }
  // Checks that exactly the runs with a stamp have the kernel's new values.
  void CheckValues() const;

 private:
  struct Run {
    std::vector<float> gradient, other, master, exp_avg, exp_avg_sq;
  };
  kernels::TileView ViewOf(Run* run, const void* const* gradients) const;
  kernels::UpdateFactors FactorsOf(size_t position) const;

  const kernels::UpdateKernelKey key_;
  const kernels::UpdateKernel* const kernel_;
  const std::vector<Run> before_;
  std::vector<Run> runs_;
  std::vector<std::atomic<uint64_t>> stamps_;
  UndoPolicy undo_ = UndoPolicy::kInPlace;
  size_t failing_position_ = kPositions;
  mutable absl::Mutex mu_;
  std::vector<int> opened_;
  std::vector<size_t> position_of_slot_;  // kPositions: none
};

// The guarantees of an executor. A binary that links the suite instantiates it.
class UpdateExecutorSuite : public testing::TestWithParam<UpdateExecutorParam> {
 protected:
  UpdateExecutorSuite()
      : pool_(GetParam().workers, /*spin=*/false),
        undo_(static_cast<size_t>(GetParam().workers)) {}
  void SetUp() override;

  UpdateExecutor& executor() { return *executor_; }
  // Checks that no slot names a run.
  void CheckNothingInFlight() const;
  // Returns whether any slot was ever written to.
  bool AnySlotUsed() const;

 private:
  WorkerPool pool_;
  std::vector<WorkerUndo> undo_;
  std::unique_ptr<UpdateExecutor> executor_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_UPDATE_EXECUTOR_SUITE_H_
