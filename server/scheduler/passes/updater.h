#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_UPDATER_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_UPDATER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/gradient_addresses.h"
#include "server/scheduler/passes/speculation.h"
#include "server/scheduler/record_pass.h"
#include "server/scheduler/step_counts.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// The fused pass of a step over the records of a job: which runs are updated,
// with which gradients and factors. An executor updates them.
//
// Threads: one caller at a time; the executor's threads call the overrides.
class Updater final : private UpdateTasks {
 public:
  // The arguments must outlive this object.
  Updater(const StepPlan* plan, const StepMemory* memory,
          UpdateExecutor* executor, const StepCounts* counts,
          Speculation* speculation);

  // Updates the runs that do not have the step's stamp. An error is one of the
  // store or the executor: a part of the runs has the step, and the same call,
  // of this or a later process, does the rest.
  absl::Status MakePass(const StepUpdate& update);

 private:
  using Visit = absl::FunctionRef<void(UpdateTask&)>;

  absl::Status Open(size_t slot, size_t position) override;
  void ForEachTask(size_t slot, Visit visit) override;
  void Close(size_t slot) override;
  void ForEachTaskOf(const storage::RecordView& record, uint64_t begin,
                     uint64_t end, UpdateTask* task,
                     GradientAddresses::Buffer* buffer, Visit visit);

  const StepPlan& plan_;
  const StepMemory& memory_;
  UpdateExecutor& executor_;
  const StepCounts& counts_;
  Speculation& speculation_;
  const GradientAddresses addresses_;
  RecordPass pass_;
  // The records of open slots, each on cache lines of its own. One that is not
  // pinned has no addresses but the parameter area's.
  struct alignas(64) Slot {
    std::optional<storage::StateStore::Pin> pin;
    std::optional<storage::RecordView> record;
  };
  const std::unique_ptr<Slot[]> slots_;
  const StepUpdate* update_ = nullptr;  // of the pass
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_UPDATER_H_
