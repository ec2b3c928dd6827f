#include "server/scheduler/step_scheduler.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "proto/types/status_macros.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/gradient_log.h"
#include "server/scheduler/passes/lag_pass.h"
#include "server/scheduler/passes/log_replay.h"
#include "server/scheduler/passes/state_clearing.h"
#include "server/scheduler/state_placement.h"

namespace optstate::scheduler {
namespace {

absl::Span<WorkerUndo> UndoOf(const StepScheduler::Options& options) {
  return {reinterpret_cast<WorkerUndo*>(options.undo.data()),
          options.undo.size() / sizeof(WorkerUndo)};
}

Accumulation AccumulationOf(const storage::StateStore& store) {
  if (!store.accumulates()) return {};
  return store.accumulates_float() ? AccumulateDType::kFloat32
                                   : AccumulateDType::kGradient;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepScheduler>> StepScheduler::Create(
    const Options& options) {
  const Layout& layout = options.store->layout();
  const Accumulation accumulation = AccumulationOf(*options.store);
  OPTSTATE_ASSIGN_OR_RETURN(
      std::unique_ptr<StepPlan> plan,
      StepPlan::Make(&layout, accumulation, options.grain_elements));
  std::unique_ptr<UpdateExecutor> own;
  if (options.executor == nullptr) {
    own = std::make_unique<CpuUpdateExecutor>(options.pool, UndoOf(options),
                                              options.observer);
  } else {
    OPTSTATE_RETURN_IF_ERROR(options.executor->CanUpdate(layout, accumulation));
  }
  std::unique_ptr<StepScheduler> scheduler(
      new StepScheduler(options, std::move(plan), std::move(own)));
  if (scheduler->non_separable_.has_value()) {
    OPTSTATE_RETURN_IF_ERROR(scheduler->non_separable_->Init());
  }
  GradientLog log(options.gradient_log);
  OPTSTATE_RETURN_IF_ERROR(
      ReplayLog(*scheduler->plan_, scheduler->memory_, &log, options.pool));
  return scheduler;
}

StepScheduler::StepScheduler(const Options& options,
                             std::unique_ptr<StepPlan> plan,
                             std::unique_ptr<UpdateExecutor> executor)
    : memory_{options.store,   options.recovery, options.control,
              UndoOf(options), options.redo,     options.speculation},
      pool_(*options.pool),
      observer_(options.observer),
      plan_(std::move(plan)),
      own_executor_(std::move(executor)),
      executor_(own_executor_ != nullptr ? *own_executor_ : *options.executor),
      counts_(plan_.get(), &memory_),
      norms_(plan_.get(), &memory_, &executor_),
      stager_(plan_.get(), &memory_, &executor_, norms_.sums_of_squares()),
      speculation_(plan_.get(), &memory_, &pool_),
      updater_(plan_.get(), &memory_, &executor_, &counts_, &speculation_),
      non_separable_(plan_->non_separable_kernel() == nullptr
                         ? std::nullopt
                         : std::optional<NonSeparableUpdater>(
                               std::in_place, plan_.get(), &memory_, &pool_,
                               &executor_, &counts_, observer_)),
      recovery_(plan_.get(), &memory_, &executor_, &counts_,
                non_separable_.has_value() ? &*non_separable_ : nullptr,
                norms_.sums_of_squares(), observer_) {}

absl::Status StepScheduler::MoveToNodes(const WorkerPlacement& placement) {
  return MoveStateToNodes(*plan_, memory_.store, placement);
}

absl::Status StepScheduler::MakePass(const Update& update) {
  return non_separable_.has_value() ? non_separable_->MakePass(update)
                                    : updater_.MakePass(update);
}

absl::Status StepScheduler::ForgetStep(bool is_whole) {
  // No record of whole parameters lags behind a copy.
  if (is_whole || non_separable_.has_value()) {
    executor_.DropCopies();
  } else {
    OPTSTATE_RETURN_IF_ERROR(CatchUpRecords(executor_.lag(),
                                            /*is_written=*/true, memory_.store,
                                            &pool_));
  }
  recovery_.ForgetStep();
  speculation_.Forget();
  return absl::OkStatus();
}

absl::Status StepScheduler::CatchUp() {
  return CatchUpRecords(executor_.lag(), /*is_written=*/false, memory_.store,
                        &pool_);
}

bool StepScheduler::WorkAhead() {
  if (executor_.lag() == nullptr || non_separable_.has_value() ||
      !memory_.store->pins_at_once()) {
    return false;
  }
  // A millisecond or so.
  constexpr size_t kSubGroups = 64;
  const size_t begin = next_ahead_;
  const size_t size = memory_.store->sub_groups().size();
  next_ahead_ = std::min(size, begin + kSubGroups);
  pool_.ParallelFor(next_ahead_ - begin, [&](size_t i) {
    if (!executor_.IsDue(memory_.store->sub_groups()[begin + i])) return;
    // An error is the next step's as well.
    memory_.store->PinSubGroup(begin + i, storage::StateStore::Access::kRead)
        .IgnoreError();
  });
  return next_ahead_ < size;
}

absl::Status StepScheduler::Apply(const Update& update) {
  next_ahead_ = 0;
  OPTSTATE_RETURN_IF_ERROR(recovery_.FinishRunsInFlight(update));
  OPTSTATE_RETURN_IF_ERROR(MakePass(update));
  if (observer_ != nullptr) observer_->OnRunsDone(update.step);
  counts_.Count(update);
  return absl::OkStatus();
}

absl::Status StepScheduler::Speculate(Update update) {
  update.speculative = true;
  speculation_.Begin(update.step);
  return MakePass(update);
}

absl::Status StepScheduler::ClearState(uint32_t first_parameter) {
  return scheduler::ClearState(*plan_, memory_, &pool_, first_parameter);
}

}  // namespace optstate::scheduler
