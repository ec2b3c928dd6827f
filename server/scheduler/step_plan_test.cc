#include "server/scheduler/step_plan.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/scheduler_test_job.h"

namespace optstate::scheduler {
namespace {

using JobSetup = SchedulerTestJob::Setup;

TEST(StepPlanTest, EachParameterHasTheKernelOfItsDtypes) {
  const SchedulerTestJob job(
      {.state = StateFormat::kBFloat16, .master = MasterFormat::kSplit});
  const StepPlan& plan = job.plan();
  EXPECT_EQ(plan.non_separable_kernel(), nullptr);
  for (uint32_t p = 0; p < job.layout().parameters().size(); ++p) {
    const kernels::UpdateKernelKey& key = plan.kernel(p).key;
    const DType dtype = job.layout().parameters()[p].dtype;
    EXPECT_EQ(key.parameter, dtype);
    EXPECT_EQ(key.gradient, dtype);
    EXPECT_EQ(key.state, StateFormat::kBFloat16);
    EXPECT_EQ(key.master, dtype == DType::kFloat32 ? MasterFormat::kParameter
                                                   : MasterFormat::kSplit);
    EXPECT_EQ(plan.kernel(p).functions, *kernels::FindUpdateKernel(key));
  }
}

TEST(StepPlanTest, FloatSumsAreWhatIsUpdatedWith) {
  const SchedulerTestJob plain({});
  EXPECT_FALSE(plain.plan().accumulates());
  EXPECT_EQ(plain.plan().sum_dtype(3), DType::kBFloat16);
  const SchedulerTestJob sums({.accumulation = AccumulateDType::kGradient});
  EXPECT_TRUE(sums.plan().accumulates());
  EXPECT_EQ(sums.plan().sum_dtype(3), DType::kBFloat16);
  const SchedulerTestJob floats({.accumulation = AccumulateDType::kFloat32});
  EXPECT_EQ(floats.plan().sum_dtype(3), DType::kFloat32);
  EXPECT_EQ(floats.plan().kernel(3).key.gradient, DType::kFloat32);
}

TEST(StepPlanTest, ARunIsOfTheParameterThatHasIt) {
  const SchedulerTestJob job({});
  uint64_t runs = 0;
  for (uint32_t p = 0; p < job.layout().parameters().size(); ++p) {
    job.plan().ForEachRunOf(p, [&](uint64_t run, uint64_t, uint64_t) {
      EXPECT_EQ(job.plan().ParameterOfRun(run), p);
      ++runs;
    });
  }
  EXPECT_EQ(runs, job.layout().run_count());
}

TEST(StepPlanTest, SubGroupsHaveEachElementOnce) {
  SchedulerTestJob job({});
  std::vector<uint64_t> seen(job.layout().parameters().size(), 0);
  for (const SubGroup& range : job.store().sub_groups().all()) {
    job.plan().ForEachParameterIn(
        range, [&](uint32_t p, uint64_t begin, uint64_t end) {
          EXPECT_EQ(begin, seen[p]);
          seen[p] = end;
        });
  }
  for (uint32_t p = 0; p < seen.size(); ++p) {
    EXPECT_EQ(seen[p], job.plan().numel(p));
  }
}

TEST(StepPlanTest, OneRankStandsForAllThatReplicate) {
  const SchedulerTestJob split({.ranks = 3});
  EXPECT_GT(split.plan().OwnersOf(0).size(), 1u);
  const SchedulerTestJob replicated({.ranks = 3, .replicated = true});
  EXPECT_EQ(replicated.plan().OwnersOf(0).size(), 1u);
  EXPECT_EQ(replicated.plan().pieces().pieces(0).size(), 3u);
}

TEST(StepPlanTest, UpdateBytesAreThoseOfAllArrays) {
  // Gradient read; parameter, which is its own master, and two arrays read and
  // written.
  const uint64_t elements = 100 * 130;
  const std::vector<uint8_t> first = {1, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(SchedulerTestJob({}).plan().UpdateBytes(first),
            elements * 4 * (1 + 2 * 3));
  // The gradients of all ranks are read.
  EXPECT_EQ(SchedulerTestJob({.ranks = 3, .replicated = true})
                .plan()
                .UpdateBytes(first),
            elements * 4 * (3 + 2 * 3));
  // bfloat16 with a master beside it: the parameter is written only.
  const std::vector<uint8_t> fourth = {0, 0, 0, 1, 0, 0, 0};
  EXPECT_EQ(SchedulerTestJob({}).plan().UpdateBytes(fourth),
            uint64_t{70 * 64} * (2 + 2 + 4 * 2 * 3));
}

TEST(StepPlanTest, ShapesThatAnUpdateCannotTakeAreRefused) {
  LayoutSpec spec;
  spec.optimizer = OptimizerKind::kMuon;
  spec.groups.resize(1);
  ParameterSpec parameter;
  parameter.name = "a.bias";
  parameter.shape = {10};
  parameter.numel = 10;
  spec.parameters = {parameter};
  const absl::Status status =
      StepPlan::CheckKernels(*Layout::Make(std::move(spec)), {});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("a.bias"), std::string::npos) << status;
}

}  // namespace
}  // namespace optstate::scheduler
