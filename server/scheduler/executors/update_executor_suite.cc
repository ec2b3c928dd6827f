#include "server/scheduler/executors/update_executor_suite.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "proto/types/optimizer.h"

namespace optstate::scheduler {
namespace {

constexpr auto kPositions = WatchedUpdates::kPositions;
constexpr auto kNumel = WatchedUpdates::kNumel;

std::vector<float> Random(std::mt19937_64* random) {
  std::normal_distribution<float> values(0, 1);
  std::vector<float> out(kNumel);
  for (float& x : out) x = values(*random);
  return out;
}

Layout LayoutOf(DType gradient) {
  LayoutSpec spec;
  spec.groups.resize(1);
  ParameterSpec parameter;
  parameter.name = "a";
  parameter.numel = 10;
  parameter.shape = {10};
  parameter.gradient_dtype = gradient;
  spec.parameters = {parameter};
  return *Layout::Make(std::move(spec));
}

}  // namespace

WatchedUpdates::WatchedUpdates(size_t slots)
    : kernel_(*kernels::FindUpdateKernel(key_)),
      before_([] {
        std::mt19937_64 random(3);
        std::vector<Run> runs(kPositions * kRuns);
        for (Run& run : runs) {
          for (auto* array : {&run.gradient, &run.other, &run.master,
                              &run.exp_avg, &run.exp_avg_sq}) {
            *array = Random(&random);
          }
          for (float& x : run.exp_avg_sq) x *= x;
        }
        return runs;
      }()),
      runs_(before_),
      stamps_(runs_.size()),
      opened_(kPositions, 0),
      position_of_slot_(slots, kPositions) {}

void WatchedUpdates::Reset() {
  runs_ = before_;
  for (std::atomic<uint64_t>& stamp : stamps_) stamp = 0;
  const absl::MutexLock lock(&mu_);
  opened_.assign(kPositions, 0);
}

absl::Status WatchedUpdates::Open(size_t slot, size_t position) {
  const absl::MutexLock lock(&mu_);
  EXPECT_LT(slot, position_of_slot_.size());
  EXPECT_LT(position, kPositions);
  EXPECT_EQ(position_of_slot_[slot], kPositions) << "the slot is open";
  if (position == failing_position_) return absl::DataLossError("a bad record");
  position_of_slot_[slot] = position;
  ++opened_[position];
  return absl::OkStatus();
}

void WatchedUpdates::Close(size_t slot) {
  const absl::MutexLock lock(&mu_);
  EXPECT_LT(position_of_slot_[slot], kPositions) << "the slot is not open";
  position_of_slot_[slot] = kPositions;
}

size_t WatchedUpdates::open_slots() const {
  const absl::MutexLock lock(&mu_);
  return static_cast<size_t>(
      std::count_if(position_of_slot_.begin(), position_of_slot_.end(),
                    [](size_t position) { return position != kPositions; }));
}

kernels::TileView WatchedUpdates::ViewOf(Run* run,
                                         const void* const* gradients) const {
  kernels::TileView view;
  view.gradients = {gradients, 2};
  view.master = view.parameter = run->master.data();
  view.state[0] = run->exp_avg.data();
  view.state[1] = run->exp_avg_sq.data();
  view.numel = kNumel;
  return view;
}

kernels::UpdateFactors WatchedUpdates::FactorsOf(size_t position) const {
  kernels::UpdateInput input;
  input.hyperparams = DefaultHyperparams(key_.optimizer);
  input.step_count = static_cast<int64_t>(position) + 1;
  return kernel_->prepare(input);
}

void WatchedUpdates::ForEachTask(size_t slot,
                                 absl::FunctionRef<void(UpdateTask&)> visit) {
  size_t position;
  {
    const absl::MutexLock lock(&mu_);
    position = position_of_slot_[slot];
  }
  // The factors and gradients are overwritten behind the visit: an executor
  // that does the task later has copied them.
  kernels::UpdateFactors factors;
  std::array<const void*, 2> gradients;
  for (size_t i = 0; i < kRuns; ++i) {
    const size_t index = position * kRuns + i;
    factors = FactorsOf(position);
    gradients = {runs_[index].gradient.data(), runs_[index].other.data()};
    UpdateTask task;
    task.run = index;
    task.step = kStep;
    task.view = ViewOf(&runs_[index], gradients.data());
    task.view.flat_begin = index * kNumel;
    task.key = &key_;
    task.kernel = kernel_;
    task.factors = &factors;
    task.undo = undo_;
    task.stamp = &stamps_[index];
    visit(task);
    std::memset(static_cast<void*>(&factors), 0xFF, sizeof(factors));
    gradients.fill(nullptr);
  }
}

void WatchedUpdates::CheckValues() const {
  for (size_t i = 0; i < runs_.size(); ++i) {
    Run expected = before_[i];
    if (IsStamped(i)) {
      const void* const gradients[] = {expected.gradient.data(),
                                       expected.other.data()};
      kernel_->apply(FactorsOf(i / kRuns), ViewOf(&expected, gradients));
      EXPECT_NE(expected.master, before_[i].master);
    }
    EXPECT_EQ(runs_[i].master, expected.master) << "run " << i;
    EXPECT_EQ(runs_[i].exp_avg, expected.exp_avg) << "run " << i;
    EXPECT_EQ(runs_[i].exp_avg_sq, expected.exp_avg_sq) << "run " << i;
  }
}

void UpdateExecutorSuite::SetUp() {
  if (GetParam().why_not != nullptr) {
    const std::string why = GetParam().why_not();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  executor_ = GetParam().make(&pool_, absl::MakeSpan(undo_));
}

void UpdateExecutorSuite::CheckNothingInFlight() const {
  for (const WorkerUndo& undo : undo_) {
    EXPECT_EQ(undo.kind.load(), static_cast<uint64_t>(UndoKind::kNone));
  }
}

bool UpdateExecutorSuite::AnySlotUsed() const {
  return std::any_of(undo_.begin(), undo_.end(), [](const WorkerUndo& undo) {
    return undo.stamp != 0 || undo.slot.progress.load() != 0;
  });
}

namespace {

TEST_P(UpdateExecutorSuite, CanUpdateSaysWhatHasNoKernel) {
  EXPECT_GE(executor().slots(), 1u);
  EXPECT_TRUE(
      executor().CanUpdate(LayoutOf(DType::kFloat32), Accumulation()).ok());
  const absl::Status refused =
      executor().CanUpdate(LayoutOf(DType::kBFloat16), Accumulation());
  // A float32 parameter may have a kernel for these gradients or not; the
  // executor says what the registry does.
  kernels::UpdateKernelKey key;
  key.gradient = DType::kBFloat16;
  key.master = MasterFormat::kParameter;
  EXPECT_EQ(refused.code(), kernels::FindUpdateKernel(key).status().code());
}

TEST_P(UpdateExecutorSuite, UpdateDoesEachTaskOnceWithTheKernelsBits) {
  WatchedUpdates updates(executor().slots());
  ASSERT_TRUE(executor().Update({0, kPositions, kPositions}, &updates).ok());
  EXPECT_EQ(updates.opened(), std::vector<int>(kPositions, 1));
  EXPECT_EQ(updates.open_slots(), 0u);
  for (size_t run = 0; run < kPositions * WatchedUpdates::kRuns; ++run) {
    EXPECT_TRUE(updates.IsStamped(run));
  }
  updates.CheckValues();
  CheckNothingInFlight();
  EXPECT_TRUE(AnySlotUsed());
}

TEST_P(UpdateExecutorSuite, UpdateVisitsItsRangeAlone) {
  WatchedUpdates updates(executor().slots());
  ASSERT_TRUE(executor().Update({3, 5, kPositions}, &updates).ok());
  std::vector<int> opened(kPositions, 0);
  opened[3] = opened[4] = 1;
  EXPECT_EQ(updates.opened(), opened);
  updates.CheckValues();
  ASSERT_TRUE(executor().Update({0, 0, 0}, &updates).ok());
  EXPECT_EQ(updates.opened(), opened);
}

TEST_P(UpdateExecutorSuite, WithoutUndoNoSlotIsWritten) {
  WatchedUpdates updates(executor().slots());
  updates.SetUndo(UndoPolicy::kNone);
  ASSERT_TRUE(executor().Update({0, kPositions, kPositions}, &updates).ok());
  for (size_t run = 0; run < kPositions * WatchedUpdates::kRuns; ++run) {
    EXPECT_TRUE(updates.IsStamped(run));
  }
  updates.CheckValues();
  EXPECT_FALSE(AnySlotUsed());
}

TEST_P(UpdateExecutorSuite, AnErrorOfOpenEndsThePass) {
  WatchedUpdates updates(executor().slots());
  updates.FailAt(8);
  EXPECT_EQ(executor().Update({0, kPositions, kPositions}, &updates).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(updates.open_slots(), 0u);
  EXPECT_EQ(updates.opened()[8], 0);
  // A run has a stamp and its new values, or neither.
  updates.CheckValues();
  CheckNothingInFlight();
}

TEST_P(UpdateExecutorSuite, ReduceGivesTheKernelsBits) {
  std::mt19937_64 random(5);
  std::vector<std::array<std::vector<float>, 2>> gradients(kPositions);
  for (auto& pair : gradients) pair = {Random(&random), Random(&random)};
  for (const kernels::Reduction reduction :
       {kernels::Reduction::kSumOfSquares, kernels::Reduction::kSumOfAbsolutes,
        kernels::Reduction::kLargestAbsolute}) {
    std::vector<double> results(kPositions, -1);
    const auto visit_all =
        [&](size_t position, absl::FunctionRef<void(const ReduceTask&)> visit) {
          std::array<const void*, 2> from = {gradients[position][0].data(),
                                             gradients[position][1].data()};
          ReduceTask task;
          task.run = position;
          task.gradients = from;
          task.numel = kNumel;
          task.reduction = reduction;
          task.result = &results[position];
          visit(task);
          from.fill(nullptr);
        };
    executor().Reduce({2, kPositions, kPositions}, visit_all);
    for (size_t i = 0; i < kPositions; ++i) {
      const void* const from[] = {gradients[i][0].data(),
                                  gradients[i][1].data()};
      EXPECT_EQ(results[i], i < 2 ? -1
                                  : kernels::Reduce(reduction, DType::kFloat32,
                                                    from, kNumel));
    }
  }
}

TEST_P(UpdateExecutorSuite, ReduceAddsToSumsAndMarksThem) {
  std::mt19937_64 random(6);
  std::vector<std::vector<float>> gradients, sums, expected;
  for (size_t i = 0; i < kPositions; ++i) {
    gradients.push_back(Random(&random));
    sums.push_back(Random(&random));
    expected.push_back(sums.back());
  }
  std::vector<std::atomic<uint64_t>> marks(kPositions);
  std::vector<double> results(kPositions, -1);
  const auto is_first = [](size_t position) { return position % 2 == 0; };
  executor().Reduce(
      {0, kPositions, kPositions},
      [&](size_t position, absl::FunctionRef<void(const ReduceTask&)> visit) {
        const void* const from = gradients[position].data();
        ReduceTask task;
        task.run = position;
        task.gradients = absl::MakeConstSpan(&from, 1);
        task.numel = kNumel;
        task.sum = {sums[position].data(), DType::kFloat32, is_first(position),
                    &marks[position], 70 + position};
        task.result = &results[position];
        visit(task);
      });
  for (size_t i = 0; i < kPositions; ++i) {
    kernels::Accumulate(DType::kFloat32, gradients[i].data(), is_first(i),
                        expected[i].data(), kNumel);
    EXPECT_EQ(sums[i], expected[i]);
    EXPECT_EQ(marks[i].load(), 70 + i);
    EXPECT_EQ(results[i], kernels::SumOfSquares(DType::kFloat32,
                                                expected[i].data(), kNumel));
  }
  CheckNothingInFlight();
}

}  // namespace
}  // namespace optstate::scheduler
