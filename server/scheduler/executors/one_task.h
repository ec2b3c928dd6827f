#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_ONE_TASK_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_ONE_TASK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/executors/update_executor.h"

namespace optstate::scheduler {

// The update of one view as one task.
class OneTask final : public UpdateTasks {
 public:
  OneTask(const kernels::UpdateKernelKey& key,
          const kernels::UpdateFactors& factors, const kernels::TileView& view)
      : key_(key),
        factors_(factors),
        view_(view),
        kernel_(*kernels::FindUpdateKernel(key)) {}

  absl::Status Open(size_t, size_t) override { return absl::OkStatus(); }
  void ForEachTask(size_t,
                   absl::FunctionRef<void(UpdateTask&)> visit) override {
    UpdateTask task;
    task.step = 1;
    task.view = view_;
    task.key = &key_;
    task.kernel = kernel_;
    task.factors = &factors_;
    task.stamp = &stamp_;
    visit(task);
  }
  void Close(size_t) override {}
  bool is_done() const { return stamp_.load() == 1; }

 private:
  const kernels::UpdateKernelKey key_;
  const kernels::UpdateFactors factors_;
  const kernels::TileView view_;
  const kernels::UpdateKernel* const kernel_;
  std::atomic<uint64_t> stamp_{0};
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_ONE_TASK_H_
