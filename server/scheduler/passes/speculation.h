#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_SPECULATION_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_SPECULATION_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "proto/types/layout.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/record_keeper.h"

namespace optstate::scheduler {

// Runs that are updated before their step is decided. A RecordKeeper, whose
// epoch is the step, has the values that they had; the control file names the
// step.
//
// Threads: Keep() by many; the rest by one thread.
class Speculation {
 public:
  using Run = storage::RecordKeeper::RunRange;

  // Returns false for optimizers with non-separable updates, which are not
  // rolled back.
  static bool CanSpeculate(const Layout& layout);
  // Returns the bytes of the file.
  static uint64_t Bytes(const Layout& layout) {
    return storage::RecordKeeper::BytesNeeded(layout);
  }

  // The arguments must outlive this object.
  Speculation(const StepPlan* plan, const StepMemory* memory, WorkerPool* pool);

  // Notes that runs of the step are about to be updated. May be repeated: what
  // is kept of the step stays.
  void Begin(uint64_t step);
  // Keeps a run's values before the step's update of it.
  void Keep(const storage::RecordView& record, const Run& run, uint64_t step) {
    keeper_->BeforeWrite(record, step, run.parameter, run.begin, run.numel);
  }
  // Restores all that was kept of the step, and forgets what the workers had in
  // flight of it. If interrupted, this is repeated.
  absl::Status RollBack(uint64_t step);
  // Forgets what was kept of any step, which will not be rolled back: its
  // records are to be cleared, or nothing was speculated about. After the
  // layout has grown this is needed, because entries lie elsewhere.
  void Forget();

 private:
  void RepairRun(const storage::RecordView& record, const Run& run);

  const StepPlan& plan_;
  const StepMemory& memory_;
  WorkerPool& pool_;
  // Keeps the overwritten values; none when the job has no file for them.
  std::optional<storage::RecordKeeper> keeper_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_SPECULATION_H_
