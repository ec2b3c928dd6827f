// Tests records that stay on devices, beside a copy that the CPU's kernels
// alone update: whatever happens between the steps, no bit differs. With
// emulated devices, and with a GPU, which skips where there is none.

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

class DeviceResidentsTest : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (!GetParam().is_cuda) return;
    const auto devices = accelerator::MakeCudaRuntime()->Devices();
    if (devices.ok() && !devices->empty()) return;
    GTEST_SKIP() << "no device of CUDA: " << devices.status();
  }

  const uint64_t seed_ = kernels::TestSeed();
};

TEST_P(DeviceResidentsTest, InASteadyStateOnlyParametersComeBack) {
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  job.Step();
  const auto before = job.executor().counters();
  job.Step();
  const auto after = job.executor().counters();
  uint64_t to_host = before.devices[0].bytes_to_host;
  for (const auto& run : job.runs()) {
    to_host += (run.tested->parameter().size() + 15) / 16 * 16;
  }
  EXPECT_EQ(after.devices[0].bytes_to_host, to_host);
  EXPECT_EQ(after.devices[0].resident_bytes, job.record_bytes());
  EXPECT_EQ(after.devices[0].resident_elements, before.device_elements);
  EXPECT_EQ(after.log_bytes, job.log().size());
}

TEST_P(DeviceResidentsTest, NothingStaysWithoutABudgetNorBehindRelease) {
  Job job(GetParam(), {}, seed_);
  for (const uint64_t budget : {uint64_t{0}, job.record_bytes() / 48 * 16}) {
    ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, budget).ok());
    for (int i = 0; i < 3; ++i) job.Step();
    const auto counters = job.executor().counters();
    EXPECT_EQ(counters.devices[0].resident_elements > 0, budget > 0);
    EXPECT_LE(counters.devices[0].resident_bytes, budget);
    job.Release();
    job.CheckSettled();
    job.Step();
    job.CheckSettled();
    const auto released = job.executor().counters();
    EXPECT_EQ(released.devices[0].resident_bytes, 0u);
    EXPECT_EQ(released.log_bytes, 0u);
    EXPECT_EQ(released.cpu_elements, 0u);
  }
}

// A record on disk is read for every kSteps-th step alone.
TEST_P(DeviceResidentsTest, MostStepsNeedNoRecord) {
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  for (size_t i = 0; i < kRuns; ++i) {
    EXPECT_TRUE(job.executor().NeedsRecord(i, 1)) << "it is not there yet";
  }
  job.Step();
  for (size_t i = 0; i < kRuns; ++i) {
    uint64_t needed = 0;
    for (uint64_t k = 1; k < GradientLog::kSteps; ++k) {
      if (job.executor().NeedsRecord(i, job.step() + k)) ++needed;
    }
    EXPECT_LE(needed, 1u) << i;
  }
  for (int i = 0; i < 8; ++i) job.Step();
  EXPECT_GT(job.updates_without_record(), 0u);
  job.Settle();
  for (size_t i = 0; i < kRuns; ++i) {
    EXPECT_TRUE(job.executor().NeedsRecord(i, job.step() + 1));
  }
  job.CheckSettled();
}

// The log has the sum, as has the device.
TEST_P(DeviceResidentsTest, GradientsOfSeveralRanksAreSummed) {
  Job job(GetParam(), {.ranks = 3}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  for (int i = 0; i < 6; ++i) job.Step();
  const auto counters = job.executor().counters();
  EXPECT_EQ(counters.devices[0].resident_bytes, job.record_bytes());
  EXPECT_EQ(counters.cpu_elements, 0u);
  job.Restart();
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  for (int i = 0; i < 3; ++i) job.Step(/*visited_percent=*/60);
  job.Release();
  job.CheckSettled();
}

TEST_P(DeviceResidentsTest, WhatALostDeviceHadIsNotLost) {
  if (GetParam().is_cuda) GTEST_SKIP() << "no GPU is lost on purpose";
  for (const double cpu_fraction : {0.0, 0.5}) {
    Job job(GetParam(), {.devices = 2}, seed_);
    ASSERT_TRUE(job.Share(cpu_fraction, job.record_bytes()).ok());
    for (int i = 0; i < 4; ++i) job.Step();
    job.faults().LoseAfter(7);
    for (int i = 0; i < 4; ++i) job.Step(/*visited_percent=*/50);
    EXPECT_TRUE(absl::IsInternal(job.executor().counters().failure));
    job.Settle();
    job.CheckSettled();
  }
}

TEST_P(DeviceResidentsTest, RanksOnTheDeviceGetParametersThere) {
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  constexpr uint64_t kBytes = 1 << 20;  // more than all parameters have
  const absl::Status shared = job.ShareParameters(0, kBytes);
  if (GetParam().is_cuda && absl::IsFailedPrecondition(shared)) {
    GTEST_SKIP() << shared;
  }
  ASSERT_TRUE(shared.ok()) << shared;
  EXPECT_EQ(job.CheckShared(), 0u) << "before a step there is nothing";
  EXPECT_EQ(job.executor().counters().devices[0].shared_bytes, kBytes);
  job.Step();
  EXPECT_EQ(job.CheckShared(), kRuns);
  // Runs lie one behind the other, in the order of the first step.
  uint64_t offset = 0;
  for (size_t place = 0; place < kRuns; ++place) {
    const size_t i = RunAt(place);
    EXPECT_EQ(job.reader(0)->OffsetOf(i), offset);
    offset +=
        SharedParameters::Aligned(job.runs()[i].tested->parameter().size());
  }
  // Another rank gets the same memory, with what is there.
  ASSERT_TRUE(job.ShareParameters(0, 2 * kBytes).ok());
  EXPECT_EQ(job.CheckShared(), kRuns);
  EXPECT_EQ(job.executor().counters().devices[0].shared_bytes, kBytes);
  // A run without a gradient keeps its values.
  job.Step(/*visited_percent=*/40);
  EXPECT_EQ(job.CheckShared(), kRuns);
  // Runs that are read stay; runs that are written come with their next step.
  job.MakeCurrent(0, kFlatEnd / 2, /*is_written=*/false);
  EXPECT_EQ(job.CheckShared(), kRuns);
  job.MakeCurrent(0, kFlatEnd / 2, /*is_written=*/true);
  job.Overwrite(0, kFlatEnd / 2);
  EXPECT_EQ(job.CheckShared(), kRuns / 2);
  job.Step();
  EXPECT_EQ(job.CheckShared(), kRuns);
  job.Release();
  EXPECT_TRUE(job.reader(0)->is_over());
  EXPECT_EQ(job.CheckShared(), 0u);
  EXPECT_EQ(job.executor().counters().devices[0].shared_bytes, 0u);
}

TEST_P(DeviceResidentsTest, ParametersAreSharedAsFarAsThereIsRoom) {
  Job job(GetParam(), {}, seed_);
  const absl::Status nothing_stays = job.ShareParameters(0, 4096);
  EXPECT_TRUE(absl::IsFailedPrecondition(nothing_stays)) << nothing_stays;
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  EXPECT_FALSE(job.ShareParameters(1, 4096).ok()) << "there is one device";
  job.Step();
  // Room for some of the records that are there already.
  uint64_t bytes = 0;
  for (size_t place = 0; place < kRuns / 2; ++place) {
    bytes += SharedParameters::Aligned(
        job.runs()[RunAt(place)].tested->parameter().size());
  }
  const absl::Status shared = job.ShareParameters(0, bytes);
  if (GetParam().is_cuda && absl::IsFailedPrecondition(shared)) {
    GTEST_SKIP() << shared;
  }
  ASSERT_TRUE(shared.ok()) << shared;
  EXPECT_EQ(job.CheckShared(), 0u);
  job.Step();
  EXPECT_EQ(job.CheckShared(), kRuns / 2);
}

TEST_P(DeviceResidentsTest, ADeviceThatSharesNothingKeepsNoMemoryForIt) {
  if (GetParam().is_cuda) GTEST_SKIP() << "a GPU refuses when it does";
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  job.faults().RefuseExportAfter(0);
  const absl::Status refused = job.ShareParameters(0, 1 << 20);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  job.Step();
  EXPECT_EQ(job.executor().counters().devices[0].shared_bytes, 0u);
  ASSERT_TRUE(job.ShareParameters(0, 1 << 20).ok());
  job.Step();
  EXPECT_EQ(job.CheckShared(), kRuns);
}

TEST_P(DeviceResidentsTest, WhatTheCpuUpdatesInsteadIsNotOnTheDevice) {
  if (GetParam().is_cuda) GTEST_SKIP() << "no GPU is lost on purpose";
  Job job(GetParam(), {.opens_all = true}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  ASSERT_TRUE(job.ShareParameters(0, 1 << 20).ok());
  job.Step();
  job.faults().FailLaunchAfter(0);
  job.Step();
  EXPECT_LT(job.CheckShared(), kRuns);
  job.Step();
  EXPECT_EQ(job.CheckShared(), kRuns);
  job.faults().LoseAfter(0);
  job.Step();
  EXPECT_EQ(job.CheckShared(), 0u);
  EXPECT_FALSE(job.ShareParameters(0, 1 << 20).ok()) << "it is lost";
}

template <typename T, size_t kCount>
T OneOf(const T (&choices)[kCount], std::mt19937_64* random) {
  return choices[(*random)() % kCount];
}

void ShareAnew(Job* job, std::mt19937_64* random) {
  const double fraction = OneOf({0.0, 0.3, 0.7, 1.0}, random);
  const uint64_t eighths = OneOf<uint64_t>({0, 1, 4, 8}, random);
  const size_t log_tiles = OneOf({kRuns, kRuns, kRuns / 4}, random);
  const absl::Status shared =
      job->Share(fraction, job->record_bytes() * eighths / 8, log_tiles);
  // A device that is lost has nothing to share.
  EXPECT_TRUE(shared.ok() || (fraction < 1 && absl::IsInternal(shared)))
      << shared;
  job->CheckSettled();
}

// Lets something happen between two steps, or in the next one, or nothing.
void LetHappen(Job* job, std::mt19937_64* random) {
  const uint64_t begin = (*random)() % kRuns * kTileElements;
  const uint64_t end = begin + (*random)() % kRuns * kTileElements;
  switch ((*random)() % 14) {
    case 0:
      return job->MakeCurrent(begin, end, /*is_written=*/false);
    case 1:
      job->MakeCurrent(begin, end, /*is_written=*/true);
      return job->Overwrite(begin, end);
    case 2:
      job->Settle();
      return job->CheckSettled();
    case 3:
      return ShareAnew(job, random);
    case 4:
      job->Restart();
      return ShareAnew(job, random);
    case 5:
      return job->faults().FailLaunchAfter(OneOf({0, 1, 4}, random));
    case 6:
      return job->faults().LoseAfter(OneOf({0, 10, 30}, random));
    case 7:
      job->WorkAhead();
      return;
    case 8:
      return job->Replace();
    case 9:
      // Refused where nothing stays, or the device is lost.
      for (const size_t device : {0, 1}) {
        job->ShareParameters(device, OneOf<uint64_t>({20000, 1 << 20}, random))
            .IgnoreError();
      }
  }
}

TEST_P(DeviceResidentsTest, WhateverHappensNoBitDiffers) {
  const bool is_cuda = GetParam().is_cuda;
  for (uint64_t i = 0; i < (is_cuda ? 4 : 12) && !HasFailure(); ++i) {
    SCOPED_TRACE(absl::StrCat("seed ", seed_, " + ", i));
    std::mt19937_64 random(seed_ + i);
    const Job::Setup setup = {
        .devices = is_cuda ? 1 : OneOf<size_t>({1, 2}, &random),
        .records_max = OneOf<size_t>({2, kSlots}, &random),
        .batch_bytes = OneOf<uint64_t>({20000, 90000, 400000}, &random),
        .direct_bytes_min = OneOf<uint64_t>({1, 9000, UINT64_MAX}, &random),
        .ranks = OneOf<size_t>({1, 1, 2, 5}, &random)};
    Job job(GetParam(), setup, random());
    ShareAnew(&job, &random);
    for (int step = 0; step < 25 && !HasFailure(); ++step) {
      job.Step(OneOf<uint32_t>({100, 80, 30}, &random));
      LetHappen(&job, &random);
    }
    job.Settle();
    job.CheckSettled();
  }
}

INSTANTIATE_TEST_SUITE_P(Emulated, DeviceResidentsTest,
                         testing::ValuesIn(Formats(/*is_cuda=*/false)),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceResidentsTest,
                         testing::ValuesIn(Formats(/*is_cuda=*/true)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace optstate::scheduler::residents
