#include "server/scheduler/executors/fake_update_executor.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "proto/types/status_macros.h"
#include "server/scheduler/executors/cpu_tile.h"
#include "server/scheduler/step_plan.h"

namespace optstate::scheduler {
namespace {

std::vector<const void*> Copy(absl::Span<const void* const> gradients) {
  return std::vector<const void*>(gradients.begin(), gradients.end());
}

}  // namespace

absl::Status FakeUpdateExecutor::CanUpdate(const Layout& layout,
                                           Accumulation accumulation) const {
  return StepPlan::CheckKernels(layout, accumulation);
}

std::vector<size_t> FakeUpdateExecutor::Shuffled(const IndexRange& positions) {
  std::vector<size_t> order(positions.end - positions.begin);
  std::iota(order.begin(), order.end(), positions.begin);
  std::shuffle(order.begin(), order.end(), random_);
  return order;
}

void FakeUpdateExecutor::Reduce(const IndexRange& positions,
                                ReduceTasks tasks) {
  std::vector<HeldReduction> held;
  for (const size_t position : Shuffled(positions)) {
    tasks(position, [&](const ReduceTask& task) {
      held.push_back({task, Copy(task.gradients)});
    });
  }
  std::shuffle(held.begin(), held.end(), random_);
  for (HeldReduction& reduction : held) {
    reduction.task.gradients = reduction.gradients;
    ReduceOnCpu(reduction.task, undo_);
  }
}

absl::Status FakeUpdateExecutor::Update(const IndexRange& positions,
                                        UpdateTasks* tasks) {
  std::vector<size_t> order = Shuffled(positions);
  free_slots_.resize(kSlots);
  std::iota(free_slots_.begin(), free_slots_.end(), 0);
  absl::Status status;
  while (!order.empty() || !held_.empty()) {
    const bool can_open = !order.empty() && !free_slots_.empty();
    if (can_open && (held_.empty() || Below(4) != 0)) {
      status = Open(free_slots_.back(), order.back(), tasks);
      order.pop_back();
    } else {
      status = DoOne(tasks);
    }
    if (status.ok()) continue;
    order.clear();
    held_.clear();
  }
  // Closes what an error has left open.
  for (size_t slot = 0; slot < kSlots; ++slot) CloseIfDone(slot, tasks);
  return status;
}

absl::Status FakeUpdateExecutor::Open(size_t slot, size_t position,
                                      UpdateTasks* tasks) {
  OPTSTATE_RETURN_IF_ERROR(tasks->Open(slot, position));
  free_slots_.pop_back();
  tasks->ForEachTask(slot, [&](UpdateTask& task) {
    held_.push_back({slot, task, Copy(task.view.gradients), *task.factors});
  });
  CloseIfDone(slot, tasks);
  return absl::OkStatus();
}

absl::Status FakeUpdateExecutor::DoOne(UpdateTasks* tasks) {
  if (tasks_until_error_.has_value() && (*tasks_until_error_)-- == 0) {
    tasks_until_error_.reset();
    return error_;
  }
  std::swap(held_[Below(held_.size())], held_.back());
  HeldUpdate update = std::move(held_.back());
  held_.pop_back();
  update.task.view.gradients = update.gradients;
  update.task.factors = &update.factors;
  UpdateOnCpu(update.task, undo_);
  CloseIfDone(update.slot, tasks);
  return absl::OkStatus();
}

void FakeUpdateExecutor::CloseIfDone(size_t slot, UpdateTasks* tasks) {
  const bool is_free = std::find(free_slots_.begin(), free_slots_.end(),
                                 slot) != free_slots_.end();
  const bool is_busy =
      std::any_of(held_.begin(), held_.end(),
                  [&](const HeldUpdate& held) { return held.slot == slot; });
  if (is_free || is_busy) return;
  free_slots_.push_back(slot);
  tasks->Close(slot);
}

}  // namespace optstate::scheduler
