#include "server/scheduler/executors/held_tasks.h"

#include "server/scheduler/executors/cpu_tile.h"

namespace optstate::scheduler {
namespace {

// The addresses of gradients that all tasks may have together.
constexpr size_t kGradientsMax = 4096;

}  // namespace

HeldTasks::HeldTasks() {
  held_.reserve(kTasksMax);
  gradients_.reserve(kGradientsMax);
}

bool HeldTasks::HasRoomFor(const UpdateTask& task) const {
  return held_.size() < kTasksMax &&
         gradients_.size() + task.view.gradients.size() <= kGradientsMax;
}

void HeldTasks::Add(const UpdateTask& task) {
  held_.push_back({.task = task,
                   .key = *task.key,
                   .factors = *task.factors,
                   .first_gradient = gradients_.size()});
  gradients_.insert(gradients_.end(), task.view.gradients.begin(),
                    task.view.gradients.end());
}

absl::Span<const void* const> HeldTasks::gradients(size_t i) const {
  return absl::MakeConstSpan(gradients_)
      .subspan(held_[i].first_gradient, held_[i].task.view.gradients.size());
}

void HeldTasks::UpdateByCpu(size_t i, WorkerUndo* undo) const {
  const Held& held = held_[i];
  UpdateTask task = held.task;
  task.view.gradients = gradients(i);
  task.key = &held.key;
  task.factors = &held.factors;
  UpdateOnCpu(task, undo);
}

void HeldTasks::Clear() {
  held_.clear();
  gradients_.clear();
}

}  // namespace optstate::scheduler
