// Tests of gradients summed over micro-steps.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

LayoutSpec LayoutOf(DType gradient_dtype) {
  LayoutSpec spec;
  spec.groups = {{}, {.options = adam::kAmsgrad}};
  spec.parameters = {
      MakeParameter("a", 100, 0, DType::kBFloat16, gradient_dtype),
      MakeParameter("none", 0, 0, DType::kFloat32, gradient_dtype),
      MakeParameter("b", 13000, 0, DType::kFloat32, gradient_dtype),
      MakeParameter("c", 5000, 1, DType::kFloat32, gradient_dtype)};
  return spec;
}

JobHarness::Setup Accumulating(DType gradient_dtype, uint32_t world_size) {
  JobHarness::Setup setup;
  setup.layout = LayoutOf(gradient_dtype);
  setup.world_size = world_size;
  setup.partition = PartitionMode::kContiguous;
  setup.accumulate = true;
  return setup;
}

class JobAccumulateTest : public ::testing::Test {
 protected:
  JobAccumulateTest() { harness_.Start(harness_.RandomTensors(1)); }
  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    spec.max_norm = 0.5;
    return spec;
  }
  void PushMicroStep(uint64_t step, uint32_t micro_step, uint64_t seed) {
    harness_.SetGradients(harness_.RandomTensors(seed));
    harness_.PushAll(step, micro_step);
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(2, AdamHyperparams());
  JobHarness harness_{Accumulating(DType::kBFloat16, 2)};
};

// Returns the expected sums: fp32, in order of micro-steps, each gradient
// rounded to the gradient dtype first.
Tensors SumsOf(const JobHarness& harness, DType dtype,
               const std::vector<uint64_t>& seeds,
               DType sum_dtype = DType::kFloat32) {
  Tensors sums;
  for (size_t m = 0; m < seeds.size(); ++m) {
    Tensors gradients = harness.RandomTensors(seeds[m]);
    if (m == 0) sums = Tensors(gradients.size());
    for (size_t p = 0; p < gradients.size(); ++p) {
      std::vector<float>& gradient = gradients[p];
      std::vector<std::byte> rounded(gradient.size() * 4 + 1);
      kernels::CastFromFloat(dtype, gradient.data(), rounded.data(),
                             gradient.size());
      kernels::CastToFloat(dtype, rounded.data(), gradient.data(),
                           gradient.size());
      if (m == 0) {
        sums[p] = gradient;
      } else {
        for (size_t i = 0; i < gradient.size(); ++i) sums[p][i] += gradient[i];
        kernels::CastFromFloat(sum_dtype, sums[p].data(), rounded.data(),
                               gradient.size());
        kernels::CastToFloat(sum_dtype, rounded.data(), sums[p].data(),
                             gradient.size());
      }
    }
  }
  return sums;
}

TEST_F(JobAccumulateTest, EqualsTheStepWithTheSum) {
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    JobHarness accumulating(Accumulating(dtype, 3));
    JobHarness::Setup plain_setup;
    plain_setup.layout = LayoutOf(DType::kFloat32);
    JobHarness plain(plain_setup);
    for (JobHarness* each : {&accumulating, &plain}) {
      each->Start(each->RandomTensors(1));
    }
    for (uint64_t step = 1; step <= 3; ++step) {
      const std::vector<uint64_t> seeds = {10 * step, 10 * step + 1,
                                           10 * step + 2};
      for (uint32_t m = 0; m < seeds.size(); ++m) {
        accumulating.SetGradients(accumulating.RandomTensors(seeds[m]));
        accumulating.PushAll(step, m);
      }
      const auto answer = accumulating.CommitAll(CommitOf(step));
      ASSERT_TRUE(answer.outcome.applied);
      const StepOutcome outcome =
          plain.Step(step, SumsOf(plain, dtype, seeds), CommitOf(step));
      EXPECT_EQ(answer.outcome.gradient_norm, outcome.gradient_norm);
      EXPECT_EQ(accumulating.StateBytes(), plain.StateBytes());
    }
  }
}

// Each sum is float(sum) + g, rounded to nearest even.
TEST_F(JobAccumulateTest, SumsInTheGradientsDType) {
  const std::vector<uint64_t> seeds = {10, 11, 12, 13};
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    JobHarness::Setup setup = Accumulating(dtype, 3);
    setup.accumulate_dtype = AccumulateDType::kGradient;
    JobHarness accumulating(setup);
    JobHarness::Setup plain_setup;
    plain_setup.layout = LayoutOf(DType::kFloat32);
    JobHarness plain(plain_setup);
    for (JobHarness* each : {&accumulating, &plain}) {
      each->Start(each->RandomTensors(1));
    }
    for (uint32_t m = 0; m < seeds.size(); ++m) {
      accumulating.SetGradients(accumulating.RandomTensors(seeds[m]));
      accumulating.PushAll(1, m);
    }
    const auto answer = accumulating.CommitAll(CommitOf(1));
    const StepOutcome outcome =
        plain.Step(1, SumsOf(plain, dtype, seeds, dtype), CommitOf(1));
    EXPECT_EQ(answer.outcome.gradient_norm, outcome.gradient_norm);
    EXPECT_EQ(accumulating.StateBytes(), plain.StateBytes());
    uint64_t bytes = 0;
    const v1::Job job = accumulating.job().Describe();
    for (const v1::ArrayBytes& array : job.arrays()) {
      if (array.name() != "accumulator") continue;
      EXPECT_EQ(array.dtype(), "gradient");
      bytes += array.bytes();
    }
    // 100, 13,000 and 5,000 elements, each up to a cache line.
    EXPECT_GE(bytes, 18100 * SizeInBytes(dtype));
    EXPECT_LE(bytes, 18100 * SizeInBytes(dtype) + 3 * 64);
  }
}

TEST_F(JobAccumulateTest, TheSumsDTypeMayBeSwitchedBetweenSessions) {
  const std::string state = harness_.StateBytes();
  for (const AccumulateDType dtype :
       {AccumulateDType::kGradient, AccumulateDType::kFloat32}) {
    harness_.setup().accumulate_dtype = dtype;
    EXPECT_THAT(harness_.Register(0).status().message(),
                HasSubstr("attached with accumulate_dtype"));
    harness_.DetachAll();
    harness_.AttachAll();
    EXPECT_EQ(harness_.StateBytes(), state);
    PushMicroStep(1, 0, 40);
    harness_.Close();
    ASSERT_TRUE(harness_.Open().ok());
    harness_.AttachAll();
    EXPECT_EQ(harness_.StateBytes(), state);
  }
}

TEST_F(JobAccumulateTest, ARepeatedMicroStepChangesNothing) {
  JobHarness once(Accumulating(DType::kBFloat16, 2));
  once.Start(once.RandomTensors(1));
  for (const uint32_t m : {0, 1}) {
    once.SetGradients(once.RandomTensors(20 + m));
    once.PushAll(1, m);
    PushMicroStep(1, m, 20 + m);
    PushMicroStep(1, m, 99);  // repeats, with other bytes in the area
  }
  const auto expected = once.CommitAll(CommitOf(1));
  const auto answer = harness_.CommitAll(CommitOf(1));
  EXPECT_EQ(answer.outcome.gradient_norm, expected.outcome.gradient_norm);
  EXPECT_EQ(harness_.StateBytes(), once.StateBytes());
}

TEST_F(JobAccumulateTest, MicroStepsAscendAndMayStartAnywhere) {
  PushMicroStep(1, 3, 20);
  const absl::Status status = harness_.Push(0, 1, 0, 4, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("ascend"));
  PushMicroStep(1, 7, 21);
  EXPECT_TRUE(harness_.CommitAll(CommitOf(1)).outcome.applied);
}

TEST_F(JobAccumulateTest, ParametersMayTakePartInSomeMicroSteps) {
  JobHarness plain([&] {
    JobHarness::Setup setup;
    setup.layout = LayoutOf(DType::kFloat32);
    return setup;
  }());
  plain.Start(plain.RandomTensors(1));
  PushMicroStep(1, 0, 20);
  harness_.SetGradients(harness_.RandomTensors(21));
  harness_.PushAll(1, 1, {2});
  ASSERT_TRUE(harness_.CommitAll(CommitOf(1)).outcome.applied);
  Tensors sums = SumsOf(plain, DType::kBFloat16, {20, 21});
  sums[2] = SumsOf(plain, DType::kBFloat16, {20})[2];
  plain.Step(1, sums, CommitOf(1));
  EXPECT_EQ(harness_.StateBytes(), plain.StateBytes());
}

// The first push of a step stores, so nothing of a former step, a dropped one
// or an overflow lingers.
TEST_F(JobAccumulateTest, AStepStartsFromNothing) {
  JobHarness fresh(Accumulating(DType::kBFloat16, 2));
  fresh.Start(fresh.RandomTensors(1));
  PushMicroStep(1, 0, 30);
  for (const uint32_t rank : {0, 1}) {
    ASSERT_TRUE(harness_.job().Abort(rank, 1).ok());
  }
  Tensors bad = harness_.RandomTensors(31);
  bad[2][12999] = std::numeric_limits<float>::infinity();
  harness_.SetGradients(bad);
  harness_.PushAll(1, 0);
  EXPECT_FALSE(harness_.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(fresh
                  .CommitAll([&] {
                    CommitSpec spec = CommitOf(1);
                    spec.found_inf = true;
                    return spec;
                  }())
                  .outcome.found_inf);
  fresh.SetGradients(fresh.RandomTensors(32));
  fresh.PushAll(2, 0);
  PushMicroStep(2, 0, 32);
  fresh.CommitAll(CommitOf(2));
  harness_.CommitAll(CommitOf(2));
  EXPECT_EQ(harness_.StateBytes(), fresh.StateBytes());
}

TEST_F(JobAccumulateTest, MayBeSwitchedBetweenSessions) {
  const auto has_accumulator = [&] {
    const v1::Job job = harness_.job().Describe();
    return std::any_of(job.arrays().begin(), job.arrays().end(),
                       [](const v1::ArrayBytes& array) {
                         return array.name() == "accumulator";
                       });
  };
  EXPECT_TRUE(has_accumulator());
  const std::string state = harness_.StateBytes();
  for (const bool accumulate : {false, true}) {
    harness_.DetachAll();
    harness_.setup().accumulate = accumulate;
    harness_.AttachAll();
    EXPECT_EQ(has_accumulator(), accumulate);
    EXPECT_EQ(harness_.StateBytes(), state);
    harness_.SetGradients(harness_.RandomTensors(40));
    harness_.PushAll(1, 0);
    EXPECT_EQ(harness_.Push(0, 1, 0, 4, 1).ok(), accumulate);
    for (const uint32_t rank : {0, 1}) {
      ASSERT_TRUE(harness_.job().Abort(rank, 1).ok());
    }
  }
}

}  // namespace
}  // namespace optstate::session
