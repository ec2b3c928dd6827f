#include "server/scheduler/passes/updater.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "proto/types/runs.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/tile_view.h"

namespace optstate::scheduler {

Updater::Updater(const StepPlan* plan, const StepMemory* memory,
                 UpdateExecutor* executor, const StepCounts* counts,
                 Speculation* speculation)
    : plan_(*plan),
      memory_(*memory),
      executor_(*executor),
      counts_(*counts),
      speculation_(*speculation),
      addresses_(plan, memory->store),
      pass_(plan, memory, executor),
      slots_(new Slot[executor->slots()]) {}

absl::Status Updater::MakePass(const StepUpdate& update) {
  update_ = &update;
  do {
    OPTSTATE_ASSIGN_OR_RETURN(const size_t positions, pass_.Begin(update));
    OPTSTATE_RETURN_IF_ERROR(executor_.Update({0, positions, positions}, this));
  } while (executor_.HasLeftTasks());
  return absl::OkStatus();
}

absl::Status Updater::Open(size_t slot, size_t position) {
  if (const SubGroup* unopened = pass_.Unopened(position)) {
    slots_[slot].record.emplace(
        &plan_.layout(), unopened,
        storage::RecordView::Bases{.parameter_area =
                                       memory_.store->parameter_area().data()});
    return absl::OkStatus();
  }
  auto pin = pass_.Pin(position);
  if (!pin.ok()) return pin.status();
  slots_[slot].pin.emplace(*std::move(pin));
  slots_[slot].record.emplace(slots_[slot].pin->record());
  return absl::OkStatus();
}

void Updater::Close(size_t slot) {
  slots_[slot].record.reset();
  slots_[slot].pin.reset();
}

void Updater::ForEachTask(size_t slot, Visit visit) {
  const storage::RecordView& record = *slots_[slot].record;
  // As a rule all parameters of a group have counted the same steps.
  const kernels::UpdateKernel* prepared_by = nullptr;
  kernels::UpdateInput prepared;
  kernels::UpdateFactors factors;
  GradientAddresses::Buffer buffer;
  UpdateTask task;
  task.step = update_->step;
  task.record = static_cast<size_t>(&record.sub_group() -
                                    memory_.store->sub_groups().all().data());
  task.has_record = slots_[slot].pin.has_value();
  task.factors = &factors;
  plan_.ForEachParameterIn(record.sub_group(), [&](uint32_t p, uint64_t begin,
                                                   uint64_t end) {
    if (update_->updated[p] == 0) return;
    task.parameter = p;
    task.key = &plan_.kernel(p).key;
    task.kernel = plan_.kernel(p).functions;
    task.sum_key = &plan_.sum_kernel(p).key;
    task.sum_kernel = plan_.sum_kernel(p).functions;
    const kernels::UpdateInput input = counts_.InputOf(p, *update_);
    if (task.kernel != prepared_by || input.step_count != prepared.step_count ||
        input.scalar != prepared.scalar) {
      factors = task.kernel->prepare(input);
      prepared_by = task.kernel;
      prepared = input;
    }
    ForEachTaskOf(record, begin, end, &task, &buffer, visit);
  });
}

// Visits the tasks of elements [begin, end) of the task's parameter.
void Updater::ForEachTaskOf(const storage::RecordView& record, uint64_t begin,
                            uint64_t end, UpdateTask* task,
                            GradientAddresses::Buffer* buffer, Visit visit) {
  const Layout& layout = plan_.layout();
  const StepUpdate& update = *update_;
  const uint32_t p = task->parameter;
  for (const PieceTable::Entry& piece : plan_.OwnersOf(p)) {
    ForEachRun(
        layout, p, std::max(begin, piece.begin), std::min(end, piece.end),
        [&](uint64_t run, uint64_t run_begin, uint64_t numel) {
          std::atomic<uint64_t>& stamp = memory_.recovery.run_stamps[run];
          if (stamp.load(std::memory_order_relaxed) == update.step) return;
          if (update.speculative) {
            speculation_.Keep(record, {run, p, run_begin, numel}, update.step);
          }
          task->run = run;
          task->stamp = &stamp;
          SetTileView(layout, record, p, run_begin, numel, &task->view);
          task->view.gradients =
              addresses_.OfUpdate(p, piece, run_begin, update, buffer);
          visit(*task);
        });
  }
}

}  // namespace optstate::scheduler
