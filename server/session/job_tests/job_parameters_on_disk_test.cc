// Jobs whose parameters are on disk: the same bits as in memory, nothing of
// them in memory whole, and typed refusals of what needs them there.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

constexpr uint64_t kSeed = 11;

struct Kind {
  OptimizerKind optimizer;
  DType dtype;
  MasterFormat master = MasterFormat::kFloat32;
  StateFormat state = StateFormat::kFloat32;
};

// Parameters of two dtypes in one record, unless masters are split; matrices,
// as Muon wants them.
LayoutSpec LayoutOf(const Kind& kind) {
  LayoutSpec layout;
  layout.optimizer = kind.optimizer;
  layout.master_format = kind.master;
  layout.state_format = kind.state;
  layout.groups.resize(1);
  const DType other =
      kind.master == MasterFormat::kSplit ? DType::kBFloat16 : DType::kFloat32;
  const auto add = [&](const char* name, int64_t rows, DType dtype) {
    ParameterSpec spec = MakeParameter(name, rows * 100, 0, dtype, dtype);
    spec.shape = {rows, 100};
    layout.parameters.push_back(std::move(spec));
  };
  add("a", 500, kind.dtype);
  add("none", 0, kind.dtype);
  add("b", 3, other);
  add("c", 333, kind.dtype);
  return layout;
}

JobHarness::Setup SetupOf(const Kind& kind, bool on_disk) {
  JobHarness::Setup setup;
  setup.layout = LayoutOf(kind);
  if (!on_disk) return setup;
  setup.storage.set_placement(v1::PLACEMENT_NVME);
  setup.storage.set_parameters_on_disk(true);
  return setup;
}

CommitSpec SpecOf(uint64_t step, absl::Span<const Hyperparams> groups) {
  CommitSpec spec;
  spec.step = step;
  spec.groups = groups;
  return spec;
}

void Train(JobHarness* job, uint64_t first, uint64_t last) {
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  for (uint64_t step = first; step <= last; ++step) {
    job->Step(step, job->RandomTensors(kSeed + step), SpecOf(step, groups));
  }
}

class JobParametersOnDiskTest : public testing::TestWithParam<Kind> {};

TEST_P(JobParametersOnDiskTest, BitsAreThoseOfAJobInMemory) {
  JobHarness in_memory(SetupOf(GetParam(), /*on_disk=*/false));
  JobHarness on_disk(SetupOf(GetParam(), /*on_disk=*/true));
  for (JobHarness* job : {&in_memory, &on_disk}) {
    job->Start(job->RandomTensors(kSeed));
    Train(job, 1, 4);
  }
  EXPECT_EQ(on_disk.StateBytes(), in_memory.StateBytes());
  // The next engine finds them where they are.
  on_disk.Close();
  ASSERT_TRUE(on_disk.Open().ok());
  on_disk.AttachAll();
  EXPECT_EQ(on_disk.StateBytes(), in_memory.StateBytes());
  EXPECT_FALSE(
      std::filesystem::exists(on_disk.directory() + "/state/parameters"));
}

TEST_P(JobParametersOnDiskTest, APowerCutLeavesTheLastDurableStep) {
  JobHarness in_memory(SetupOf(GetParam(), /*on_disk=*/false));
  JobHarness::Setup setup = SetupOf(GetParam(), /*on_disk=*/true);
  setup.storage.set_durability(v1::DURABILITY_KIND_STEP);
  JobHarness durable(setup);
  for (JobHarness* job : {&in_memory, &durable}) {
    job->Start(job->RandomTensors(kSeed));
    Train(job, 1, 2);
  }
  for (uint64_t step = 3; step <= 5; step += 2) {
    durable.Close();
    durable.DropMemory();
    ASSERT_TRUE(durable.Open().ok());
    durable.AttachAll();
    EXPECT_EQ(durable.job().Describe().committed_step(), step - 1);
    EXPECT_EQ(durable.StateBytes(), in_memory.StateBytes());
    for (JobHarness* job : {&in_memory, &durable}) Train(job, step, step + 1);
    EXPECT_EQ(durable.StateBytes(), in_memory.StateBytes());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, JobParametersOnDiskTest,
    testing::Values(Kind{OptimizerKind::kAdamW, DType::kFloat32},
                    Kind{OptimizerKind::kAdamW, DType::kBFloat16},
                    Kind{OptimizerKind::kAdamW, DType::kBFloat16,
                         MasterFormat::kSplit},
                    Kind{OptimizerKind::kAdamW, DType::kFloat16,
                         MasterFormat::kFloat32, StateFormat::kDynamic8},
                    Kind{OptimizerKind::kSgd, DType::kBFloat16},
                    Kind{OptimizerKind::kLamb, DType::kBFloat16},
                    Kind{OptimizerKind::kAdafactor, DType::kFloat32},
                    Kind{OptimizerKind::kMuon, DType::kBFloat16}));

class JobParametersTest : public testing::Test {
 protected:
  static JobHarness::Setup OnDisk() {
    return SetupOf({OptimizerKind::kAdamW, DType::kBFloat16},
                   /*on_disk=*/true);
  }
  static std::string RecordsOf(const JobHarness& job) {
    return job.disk() + "/jobs/test/records";
  }
};

TEST_F(JobParametersTest, WhatNeedsAnAreaOfThemIsRefused) {
  JobHarness job(OnDisk());
  job.Start(job.RandomTensors(kSeed));
  std::vector<std::byte> bytes(100);
  for (const absl::Status& refused :
       {job.job().OpenParameters().status(),
        job.job().ReadParameters(0, absl::MakeSpan(bytes))}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(refused.message(), testing::HasSubstr("ParameterStore"));
  }
}

TEST_F(JobParametersTest, ParametersAreFetchedInAnyJob) {
  for (const bool on_disk : {false, true}) {
    JobHarness job(SetupOf({OptimizerKind::kAdamW, DType::kBFloat16}, on_disk));
    job.Start(job.RandomTensors(kSeed));
    std::vector<std::byte> whole(50'000 * 2), part(1000 * 2);
    const auto fetch = [&](uint64_t begin, uint64_t numel,
                           std::vector<std::byte>* out) {
      return job.job().Fetch(v1::STATE_ARRAY_PARAMETER, 0, begin, numel,
                             absl::MakeSpan(*out));
    };
    ASSERT_TRUE(fetch(0, 50'000, &whole).ok());
    ASSERT_TRUE(fetch(8'000, 1000, &part).ok());  // of two records
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 16'000));
    EXPECT_TRUE(absl::IsInvalidArgument(fetch(49'001, 1000, &part).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(fetch(0, 500, &part).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        job.job().Fetch(v1::STATE_ARRAY_PARAMETER, 4, 0, 0, {}).status()));
    EXPECT_TRUE(job.job().HintParameters(ParameterHint::kPrefetch, 0, 4).ok());
    EXPECT_TRUE(job.job().HintParameters(ParameterHint::kRelease, 3, 1).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(
        job.job().HintParameters(ParameterHint::kPrefetch, 3, 2)));
  }
}

TEST_F(JobParametersTest, AParameterIsLoadedAsItsMasters) {
  JobHarness job(OnDisk());
  job.Start(job.RandomTensors(kSeed));
  ASSERT_TRUE(job.job().BeginLoad(0).ok());
  const absl::Status loaded = job.LoadArray(0, v1::STATE_ARRAY_PARAMETER, 0,
                                            std::vector<float>(50'000));
  EXPECT_TRUE(absl::IsInvalidArgument(loaded)) << loaded;
  EXPECT_THAT(loaded.message(), testing::HasSubstr("masters"));
}

TEST_F(JobParametersTest, SettingsThatContradictEachOtherAreRefused) {
  JobHarness::Setup setup = OnDisk();
  JobHarness job(setup);
  const auto refusal = [&](const v1::StorageSettings& storage) {
    job.setup().storage = storage;
    const absl::Status status = job.Register(0).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  v1::StorageSettings storage;
  storage.set_parameters_on_disk(true);
  EXPECT_THAT(refusal(storage), testing::HasSubstr("placement \"nvme\""));
  storage.set_placement(v1::PLACEMENT_HOST);
  EXPECT_THAT(refusal(storage), testing::HasSubstr("placement \"nvme\""));
  storage.Clear();
  storage.set_placement(v1::PLACEMENT_NVME);
  storage.set_parameter_cache_bytes(1 << 20);
  EXPECT_THAT(refusal(storage), testing::HasSubstr("max_in_cpu"));
  storage.set_parameters_on_disk(true);
  storage.set_parameter_cache_bytes(8192);
  EXPECT_THAT(refusal(storage), testing::HasSubstr("set at least"));
}

TEST_F(JobParametersTest, ASettingOfAJobStays) {
  JobHarness::Setup setup = OnDisk();
  setup.storage.set_parameter_cache_bytes(1 << 20);
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  job.DetachAll();
  job.setup().storage.set_parameter_cache_bytes(2 << 20);
  const absl::Status other = job.Register(0).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(other.message(), testing::HasSubstr("max_in_cpu"));
  job.setup().storage.set_parameter_cache_bytes(0);
  EXPECT_TRUE(job.Register(0).ok());
}

TEST_F(JobParametersTest, AutoThatFitsHasParametersInMemory) {
  JobHarness::Setup setup = OnDisk();
  setup.storage.set_placement(v1::PLACEMENT_AUTO);
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  EXPECT_FALSE(job.job().Describe().storage().parameters_on_disk());
  EXPECT_TRUE(job.job().OpenParameters().ok());
  job.DetachAll();
  EXPECT_TRUE(job.Register(0).ok());  // asks for the same again
}

TEST_F(JobParametersTest, ItIsDescribed) {
  JobHarness job(OnDisk());
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 1);
  const v1::ParameterCache before =
      job.job().Describe().disk().parameter_cache();
  EXPECT_GT(before.bytes(), 0u);
  job.Parameter(0);
  job.Parameter(0);
  const v1::ParameterCache after =
      job.job().Describe().disk().parameter_cache();
  EXPECT_GT(after.misses(), before.misses());
  EXPECT_GT(after.hits(), before.hits());
  const v1::Job described = job.job().Describe();
  for (const v1::ArrayBytes& array : described.arrays()) {
    EXPECT_NE(array.name(), "parameters");
  }
}

// Each record is on disk, and three of eight are in frames.
TEST_F(JobParametersTest, DamagedParametersAreDataLossByName) {
  constexpr uint64_t kSubGroup = 8192;
  constexpr uint64_t kRecords = 8;
  constexpr uint64_t kStateBytes = kSubGroup * 12;
  constexpr uint64_t kSlotBytes = kStateBytes + kSubGroup * 2;
  JobHarness::Setup setup = OnDisk();
  setup.layout.parameters.clear();
  for (uint64_t i = 0; i < kRecords; ++i) {
    setup.layout.parameters.push_back(
        MakeParameter(absl::StrCat("p", i), kSubGroup, 0, DType::kBFloat16,
                      DType::kBFloat16));
  }
  setup.storage.set_durability(v1::DURABILITY_KIND_STEP);
  JobHarness job(setup);
  job.Start(job.RandomTensors(kSeed));
  Train(&job, 1, 2);
  ASSERT_EQ(job.job().Describe().disk().frame_bytes(), kSlotBytes);
  job.Close();
  {
    std::fstream file(RecordsOf(job),
                      std::ios::in | std::ios::out | std::ios::binary);
    for (uint64_t slot = 0; slot < 2 * kRecords; ++slot) {
      const auto at =
          static_cast<std::streamoff>(slot * kSlotBytes + kStateBytes + 100);
      file.seekg(at);
      const char byte = static_cast<char>(file.get() ^ 4);
      file.seekp(at);
      file.put(byte);
    }
    ASSERT_TRUE(file.good());
  }
  ASSERT_TRUE(job.Open().ok());
  job.AttachAll();
  std::vector<std::byte> out(kSubGroup * 2);
  uint64_t damaged = 0;
  for (uint32_t p = 0; p < kRecords; ++p) {
    const absl::Status status = job.job()
                                    .Fetch(v1::STATE_ARRAY_PARAMETER, p, 0,
                                           kSubGroup, absl::MakeSpan(out))
                                    .status();
    if (status.ok()) continue;
    ++damaged;
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(status.message(), testing::HasSubstr(RecordsOf(job)));
    EXPECT_THAT(status.message(),
                testing::HasSubstr(absl::StrCat("\"p", p, "\"")));
  }
  EXPECT_EQ(damaged, kRecords - 3);
}

}  // namespace
}  // namespace optstate::session
