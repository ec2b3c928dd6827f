#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_HELD_TASKS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_HELD_TASKS_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/worker_undo.h"

namespace optstate::scheduler {

// Copies of tasks, with their keys, factors and lists of gradients, so that
// they can be done after the visit that showed them, while their record is
// open.
//
// Threads: one at a time, but UpdateByCpu may run at the same time for
// different tasks. Allocates in the constructor alone.
class HeldTasks {
 public:
  static constexpr size_t kTasksMax = 512;

  struct Held {
    UpdateTask task;
    kernels::UpdateKernelKey key;
    kernels::UpdateFactors factors;
    size_t first_gradient = 0;  // of its gradients in gradients_
  };

  HeldTasks();
  HeldTasks(const HeldTasks&) = delete;
  HeldTasks& operator=(const HeldTasks&) = delete;

  bool HasRoomFor(const UpdateTask& task) const;
  // The caller has checked that there is room.
  void Add(const UpdateTask& task);
  size_t size() const { return held_.size(); }
  bool empty() const { return held_.empty(); }
  const Held& operator[](size_t i) const { return held_[i]; }
  // Returns the addresses of the gradients of task i.
  absl::Span<const void* const> gradients(size_t i) const;
  // Does task i by the CPU's kernel.
  void UpdateByCpu(size_t i, WorkerUndo* undo) const;
  void Clear();

 private:
  std::vector<Held> held_;
  std::vector<const void*> gradients_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_HELD_TASKS_H_
