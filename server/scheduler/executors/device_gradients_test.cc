// Tests that devices take gradients from ranks' memory there, beside a copy of
// the job that the CPU's kernels alone update: whatever a rank has on the
// device, no bit differs. With emulated devices, and with a GPU, which skips
// where there is none.

#include <cstddef>
#include <cstdint>
#include <random>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/test_seed.h"
#include "server/scheduler/executors/residents_test_job.h"
#include "storage/accelerator/cuda_runtime.h"

namespace optstate::scheduler::residents {
namespace {

using Copies = Job::Copies;
using DeviceCounters = DeviceUpdateExecutor::DeviceCounters;

class DeviceGradientsTest : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (!GetParam().is_cuda) return;
    const auto devices = accelerator::MakeCudaRuntime()->Devices();
    if (!devices.ok() || devices->empty()) {
      GTEST_SKIP() << "no device of CUDA: " << devices.status();
    }
    Job job(GetParam(), {}, seed_);
    const absl::Status shared = job.ShareGradients(0);
    if (absl::IsFailedPrecondition(shared)) GTEST_SKIP() << shared;
  }
  static DeviceCounters CountersOf(Job& job) {
    return job.executor().counters().devices[0];
  }
  // Takes a step of all runs; returns what it added to the counters.
  static DeviceCounters Step(Job& job) {
    const DeviceCounters before = CountersOf(job);
    job.Step();
    DeviceCounters added = CountersOf(job);
    added.bytes_to_device -= before.bytes_to_device;
    added.gradient_bytes -= before.gradient_bytes;
    added.refused_elements -= before.refused_elements;
    added.elements -= before.elements;
    return added;
  }
  static uint64_t GradientBytes(Job& job) {
    uint64_t bytes = 0;
    for (const auto& run : job.runs()) bytes += run.gradient_bytes();
    return bytes;
  }
  static void CheckSettled(Job& job) {
    job.Settle();
    job.CheckSettled();
  }

  const uint64_t seed_ = kernels::TestSeed();
};

TEST_P(DeviceGradientsTest, WhatARankHasThereIsNotCopiedThere) {
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  job.Step();
  const DeviceCounters without = Step(job);
  EXPECT_EQ(without.gradient_bytes, 0u);
  const absl::Status shared = job.ShareGradients(0);
  ASSERT_TRUE(shared.ok()) << shared;
  for (int i = 0; i < 6; ++i) {
    const DeviceCounters with = Step(job);
    EXPECT_EQ(with.gradient_bytes, GradientBytes(job));
    EXPECT_EQ(with.refused_elements, 0u);
    EXPECT_EQ(with.elements, without.elements);
    // But for a little table the gradients and their entries are missing.
    EXPECT_LT(with.bytes_to_device,
              without.bytes_to_device - GradientBytes(job));
  }
  CheckSettled(job);
}

TEST_P(DeviceGradientsTest, WhatIsOfAnotherStepIsNotUsed) {
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  ASSERT_TRUE(job.ShareGradients(0).ok());
  job.SetCopies(Copies::kOfAnotherStep);
  for (int i = 0; i < 3; ++i) {
    const DeviceCounters stale = Step(job);
    EXPECT_EQ(stale.gradient_bytes, 0u);
    EXPECT_EQ(stale.refused_elements, 0u) << "it was not even looked at";
  }
  job.SetCopies(Copies::kRight);
  EXPECT_EQ(Step(job).gradient_bytes, GradientBytes(job));
  CheckSettled(job);
}

TEST_P(DeviceGradientsTest, WrongOnesCostTimeOnceAndNoBit) {
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  ASSERT_TRUE(job.ShareGradients(0).ok());
  EXPECT_EQ(Step(job).refused_elements, 0u);
  job.SetCopies(Copies::kWrong);
  // The first batch may be the only one, so that all of it is refused.
  const DeviceCounters wrong = Step(job);
  EXPECT_GT(wrong.refused_elements, 0u);
  EXPECT_GE(job.executor().counters().cpu_elements, wrong.refused_elements);
  // No more is taken from this rank, until it shares its memory anew.
  job.SetCopies(Copies::kRight);
  for (int i = 0; i < 3; ++i) {
    const DeviceCounters after = Step(job);
    EXPECT_EQ(after.gradient_bytes, 0u);
    EXPECT_EQ(after.refused_elements, 0u);
  }
  ASSERT_TRUE(job.ShareGradients(0).ok());
  EXPECT_EQ(Step(job).gradient_bytes, GradientBytes(job));
  CheckSettled(job);
}

TEST_P(DeviceGradientsTest, ARankThatDies) {
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  ASSERT_TRUE(job.ShareGradients(0).ok());
  EXPECT_GT(Step(job).gradient_bytes, 0u);
  job.executor().gradients().Unmap(0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Step(job).gradient_bytes, 0u);
  CheckSettled(job);
}

// The next engine finds the gradients in the log, whatever was on the device.
TEST_P(DeviceGradientsTest, AnEngineThatDies) {
  Job job(GetParam(), {}, seed_);
  for (int life = 0; life < 3; ++life) {
    ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
    EXPECT_EQ(Step(job).gradient_bytes, 0u);
    ASSERT_TRUE(job.ShareGradients(0).ok());
    for (int i = 0; i < 3; ++i) EXPECT_GT(Step(job).gradient_bytes, 0u);
    job.Restart();
  }
}

TEST_P(DeviceGradientsTest, ADeviceThatIsLost) {
  if (GetParam().is_cuda) GTEST_SKIP() << "no GPU is lost on purpose";
  for (const int commands : {0, 3, 9, 20}) {
    Job job(GetParam(), {}, seed_);
    ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
    ASSERT_TRUE(job.ShareGradients(0).ok());
    job.Step();
    job.faults().LoseAfter(commands);
    for (int i = 0; i < 3; ++i) job.Step();
    CheckSettled(job);
  }
}

// Records and gradients on different devices.
TEST_P(DeviceGradientsTest, AnotherDeviceTakesThemFromTheHost) {
  if (GetParam().is_cuda) GTEST_SKIP() << "there may be one GPU";
  Job job(GetParam(), {.devices = 2}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  ASSERT_TRUE(job.ShareGradients(1).ok());
  for (int i = 0; i < 3; ++i) job.Step();
  const auto counters = job.executor().counters();
  EXPECT_EQ(counters.devices[0].gradient_bytes, 0u);
  EXPECT_GT(counters.devices[1].gradient_bytes, 0u);
  EXPECT_LT(counters.devices[1].gradient_bytes, 3 * GradientBytes(job));
  CheckSettled(job);
}

template <typename T, size_t kCount>
T OneOf(const T (&choices)[kCount], std::mt19937_64* random) {
  return choices[(*random)() % kCount];
}

TEST_P(DeviceGradientsTest, WhateverARankHasThereNoBitDiffers) {
  const bool is_cuda = GetParam().is_cuda;
  for (uint64_t i = 0; i < (is_cuda ? 3 : 8) && !HasFailure(); ++i) {
    SCOPED_TRACE(absl::StrCat("seed ", seed_, " + ", i));
    std::mt19937_64 random(seed_ + i);
    const Job::Setup setup = {
        .devices = is_cuda ? 1 : OneOf<size_t>({1, 2}, &random),
        .records_max = OneOf<size_t>({2, kSlots}, &random),
        .batch_bytes = OneOf<uint64_t>({20000, 90000, 400000}, &random)};
    Job job(GetParam(), setup, random());
    for (int step = 0; step < 25 && !HasFailure(); ++step) {
      if (step % 5 == 0) {
        const double fraction = OneOf({0.0, 0.3, 0.7}, &random);
        const uint64_t eighths = OneOf<uint64_t>({1, 4, 8}, &random);
        ASSERT_TRUE(job.Share(fraction, job.record_bytes() * eighths / 8).ok());
      }
      if (random() % 3 == 0) {
        ASSERT_TRUE(job.ShareGradients(random() % setup.devices).ok());
      }
      job.SetCopies(OneOf({Copies::kRight, Copies::kRight,
                           Copies::kOfAnotherStep, Copies::kWrong},
                          &random));
      job.Step(OneOf<uint32_t>({100, 80, 30}, &random));
    }
    CheckSettled(job);
  }
}

INSTANTIATE_TEST_SUITE_P(Emulated, DeviceGradientsTest,
                         testing::ValuesIn(Formats(/*is_cuda=*/false)),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceGradientsTest,
                         testing::ValuesIn(Formats(/*is_cuda=*/true)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace optstate::scheduler::residents
