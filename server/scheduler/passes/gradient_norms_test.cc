#include "server/scheduler/passes/gradient_norms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/scheduler_test_job.h"

namespace optstate::scheduler {
namespace {

class GradientNormsTest : public testing::Test {
 protected:
  GradientNormsTest()
      : job_({.ranks = 2}),
        executor_(&job_.pool(), job_.memory().undo, nullptr),
        norms_(&job_.plan(), &job_.memory(), &executor_) {}

  SchedulerTestJob job_;
  CpuUpdateExecutor executor_;
  GradientNorms norms_;
  const std::vector<uint8_t> updated_ = {1, 0, 1, 1, 1, 1, 1};
};

TEST_F(GradientNormsTest, SumsAreTakenByParameterThenOverParameters) {
  const Layout& layout = job_.layout();
  const absl::Span<double> runs = norms_.sums_of_squares();
  std::fill(runs.begin(), runs.end(), 0);
  ASSERT_GE(layout.first_run(1), 3u);
  runs[0] = 1e20;
  runs[1] = 1;
  runs[layout.first_run(1)] = 1e30;  // not updated
  runs[layout.first_run(3)] = -1e20;
  runs[layout.first_run(5)] = 1;
  runs[layout.first_run(5) + 1] = 2;
  std::vector<double> by_group(2, -1);
  EXPECT_EQ(norms_.SumOfSquares(updated_, absl::MakeSpan(by_group)), 3);
  EXPECT_EQ(by_group, (std::vector<double>{0, 3}));
  std::vector<double> by_parameter(updated_.size(), -1);
  norms_.NormsByParameter(updated_, absl::MakeSpan(by_parameter));
  EXPECT_EQ(by_parameter[0], 1e10);
  EXPECT_EQ(by_parameter[1], 0);
  EXPECT_EQ(by_parameter[5], std::sqrt(3));
}

// Run by run, -1e20 and 1e20 would cancel before 1 is added.
TEST_F(GradientNormsTest, AParametersRunsAreAddedUpFirst) {
  const absl::Span<double> runs = norms_.sums_of_squares();
  std::fill(runs.begin(), runs.end(), 0);
  runs[0] = 1e20;
  runs[job_.layout().first_run(5)] = -1e20;
  runs[job_.layout().first_run(5) + 1] = 1;
  std::vector<double> by_group(2, -1);
  EXPECT_EQ(norms_.SumOfSquares(updated_, absl::MakeSpan(by_group)), 0);
  EXPECT_EQ(by_group, (std::vector<double>{1e20, -1e20}));
}

TEST_F(GradientNormsTest, OtherNormsReadTheGradientsOfAllRanks) {
  job_.SetUpdated(updated_);
  double sum = 0;
  double largest = 0;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (const Piece& piece : job_.partitions()[rank].pieces) {
      if (updated_[piece.parameter] == 0) continue;
      std::vector<float> values(piece.numel);
      kernels::CastToFloat(
          job_.layout().parameters()[piece.parameter].gradient_dtype,
          job_.gradient_areas()[rank] + piece.gradient_offset_bytes,
          values.data(), piece.numel);
      for (const float x : values) {
        sum += std::abs(double{x});
        largest = std::max(largest, std::abs(double{x}));
      }
    }
  }
  const StepUpdate update = job_.UpdateOf(1);
  EXPECT_NEAR(norms_.Norm(1, update), sum, sum * 1e-12);
  EXPECT_EQ(norms_.Norm(std::numeric_limits<double>::infinity(), update),
            largest);
}

}  // namespace
}  // namespace optstate::scheduler
