// Parameters that lie in records alone: what is read for them, what is kept,
// and what is not.

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

using Access = storage::StateStore::Access;

constexpr uint32_t kParameters = 12;
constexpr uint64_t kSectionBytes = kTileElements * 2;
// AdamW with masters of floats beside a parameter of 16 bits.
constexpr uint64_t kStateBytes = kTileElements * 12;
constexpr uint64_t kSlotBytes = kStateBytes + kSectionBytes;
const char kRecords[] = "/disk/records";

// A job of which each record has one parameter, called "p0" to "p11".
class NvmeParametersTest : public testing::Test {
 protected:
  NvmeParametersTest()
      : random_(layouts_.Uniform(0, UINT32_MAX)),
        disk_(io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT32_MAX),
                                       .folders = {"/disk"}}) {}

  NvmeTestJob::Setup SetupOf(bool is_durable) {
    LayoutSpec spec;
    spec.groups.resize(1);
    for (uint32_t i = 0; i < kParameters; ++i) {
      ParameterSpec parameter;
      parameter.name = "p" + std::to_string(i);
      parameter.numel = kTileElements;
      parameter.shape = {parameter.numel};
      parameter.dtype = DType::kBFloat16;
      spec.parameters.push_back(std::move(parameter));
    }
    NvmeTestJob::Setup setup;
    setup.layout = *Layout::Make(std::move(spec));
    setup.sub_group_elements = kTileElements;
    setup.is_durable = is_durable;
    setup.holds_parameters = true;
    setup.cache_sections = 4;
    setup.make_engine = [this] { return io::MakeSimulatedIoEngine(&disk_); };
    return setup;
  }
  // Makes a job of which every record was written; the last ones are in frames.
  void Start(bool is_durable = false) {
    job_ = std::make_unique<NvmeTestJob>(SetupOf(is_durable));
    ASSERT_EQ(job_->records(), kParameters);
    ASSERT_EQ(job_->sizes().frame, kSlotBytes);
    ASSERT_EQ(job_->sizes().section, kSectionBytes);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    WriteAll();
  }
  void WriteAll() {
    for (uint32_t i = 0; i < kParameters; ++i) {
      ASSERT_EQ(job_->Write(i, &random_), absl::OkStatus());
    }
  }
  void Prefetch(uint32_t parameter) {
    job_->store().PrefetchParameters(parameter, 1);
  }
  absl::Status Fetch(uint32_t parameter) {
    return job_->CompareParameters(parameter);
  }
  storage::ParameterCacheCounters counters() {
    return job_->store().swap_state()->parameter_cache->counters;
  }
  uint64_t bytes_read() {
    return job_->store().swap_state()->counters.bytes_read;
  }
  // Reads a record whole, and so others out of their frames.
  void TakeToFrame(uint32_t record) {
    ASSERT_EQ(job_->Compare(record), absl::OkStatus());
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  io::SimulatedDisk disk_;
  std::unique_ptr<NvmeTestJob> job_;
};

TEST_F(NvmeParametersTest, AFetchReadsParametersAlone) {
  Start();
  const uint64_t before = bytes_read();
  ASSERT_EQ(Fetch(0), absl::OkStatus());
  EXPECT_EQ(bytes_read() - before, kSectionBytes);
  EXPECT_EQ(counters().misses, 1u);
  ASSERT_EQ(Fetch(0), absl::OkStatus());
  EXPECT_EQ(bytes_read() - before, kSectionBytes);
  EXPECT_EQ(counters().hits, 1u);
  // The last record is in a frame, newer than on disk.
  ASSERT_EQ(Fetch(kParameters - 1), absl::OkStatus());
  EXPECT_EQ(bytes_read() - before, kSectionBytes);
  EXPECT_EQ(counters().from_frames, 1u);
}

TEST_F(NvmeParametersTest, AllParametersAreFetchedThroughASmallCache) {
  Start();
  for (int round = 0; round < 3; ++round) {
    for (uint32_t i = 0; i < kParameters; ++i) {
      Prefetch((i + 1) % kParameters);
      ASSERT_EQ(Fetch(i), absl::OkStatus()) << i;
      job_->store().ReleaseParameters(i, 1);
    }
    WriteAll();
  }
  EXPECT_GT(counters().hits, 0u);
}

TEST_F(NvmeParametersTest, APrefetchForWhichThereIsNoRoomIsLeftOut) {
  Start();
  job_->store().PrefetchParameters(0, 6);  // four entries
  EXPECT_EQ(counters().refused, 2u);
  for (uint32_t i = 0; i < 4; ++i) ASSERT_EQ(Fetch(i), absl::OkStatus());
  EXPECT_EQ(counters().prefetched, 4u);
  EXPECT_EQ(counters().misses, 0u);
  // An idle entry is given up for the parameter that is needed now.
  ASSERT_EQ(Fetch(5), absl::OkStatus());
  EXPECT_EQ(counters().misses, 1u);
}

TEST_F(NvmeParametersTest, KeptParametersStayUntilTheyAreReleased) {
  Start();
  Prefetch(0);
  for (uint32_t i = 1; i < 8; ++i) ASSERT_EQ(Fetch(i), absl::OkStatus());
  const uint64_t misses = counters().misses;
  ASSERT_EQ(Fetch(0), absl::OkStatus());
  EXPECT_EQ(counters().misses, misses);
  job_->store().ReleaseParameters(0, 1);
  for (uint32_t i = 1; i < 8; ++i) ASSERT_EQ(Fetch(i), absl::OkStatus());
  const uint64_t after = counters().misses;
  ASSERT_EQ(Fetch(0), absl::OkStatus());
  EXPECT_EQ(counters().misses, after + 1);
}

// The cache has what was; the record is changed and written in between.
TEST_F(NvmeParametersTest, AChangedRecordIsNotFetchedAsItWas) {
  Start(/*is_durable=*/layouts_.Uniform(0, 1) == 0);
  for (uint32_t round = 0; round < 40; ++round) {
    job_->store().PrefetchParameters(0, 4);
    if (round % 2 == 0) {
      ASSERT_EQ(Fetch(round % 4), absl::OkStatus());
    }
    for (uint32_t i = 0; i < 4; ++i) {
      ASSERT_EQ(job_->Write(i, &random_), absl::OkStatus());
    }
    for (uint32_t i = 4; i < 8; ++i) TakeToFrame(i);
    for (uint32_t i = 0; i < 4; ++i) ASSERT_EQ(Fetch(i), absl::OkStatus());
  }
}

TEST_F(NvmeParametersTest, DamagedParametersAreNamed) {
  Start();
  ASSERT_EQ(Fetch(1), absl::OkStatus());  // in the cache, and stays usable
  disk_.Flip(kRecords, 0 * kSlotBytes + kStateBytes + 100, std::byte{4});
  disk_.Flip(kRecords, 1 * kSlotBytes + kStateBytes + 100, std::byte{4});
  const absl::Status damaged = Fetch(0);
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_TRUE(absl::StrContains(damaged.message(), "/disk/records")) << damaged;
  EXPECT_TRUE(absl::StrContains(damaged.message(), "at byte 0 ")) << damaged;
  EXPECT_TRUE(absl::StrContains(damaged.message(), "\"p0\"")) << damaged;
  EXPECT_TRUE(absl::StrContains(damaged.message(), "its parameters"));
  EXPECT_EQ(Fetch(1), absl::OkStatus());
  EXPECT_EQ(Fetch(2), absl::OkStatus());
  EXPECT_TRUE(absl::IsDataLoss(Fetch(0)));  // again
  // Whole records have the same checksum, and damage of the state is not that
  // of the parameters.
  EXPECT_TRUE(absl::IsDataLoss(job_->Compare(0)));
  disk_.Flip(kRecords, 2 * kSlotBytes + 100, std::byte{4});
  job_->Close();
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  EXPECT_EQ(Fetch(2), absl::OkStatus());
  EXPECT_TRUE(absl::IsDataLoss(job_->Compare(2)));
}

TEST_F(NvmeParametersTest, AVerificationReadsParametersToo) {
  Start();
  disk_.Flip(kRecords, 3 * kSlotBytes + kStateBytes, std::byte{1});
  const auto result =
      job_->store().Verify([](const storage::VerifyResult&) { return true; });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->progress.damaged, 1u);
  ASSERT_EQ(result->damages.size(), 1u);
  EXPECT_TRUE(result->damages[0].is_parameters);
  EXPECT_EQ(result->damages[0].first_parameter, "p3");
}

TEST_F(NvmeParametersTest, AReadIsTriedThreeTimes) {
  Start();
  io::SimulatedFault fault;
  fault.kind = io::IoRequest::Kind::kRead;
  fault.path = kRecords;
  fault.begin = kStateBytes;
  fault.end = kSlotBytes;
  fault.times = kNvmeReadAttemptsMax - 1;
  disk_.AddFault(fault);
  EXPECT_EQ(Fetch(0), absl::OkStatus());
  fault.begin += kSlotBytes;
  fault.end += kSlotBytes;
  fault.times = kNvmeReadAttemptsMax;
  disk_.AddFault(fault);
  const absl::Status failed = Fetch(1);
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  EXPECT_TRUE(absl::StrContains(failed.message(), "tried 3 times")) << failed;
  EXPECT_EQ(Fetch(1), absl::OkStatus());
}

TEST_F(NvmeParametersTest, ACacheThatIsTooSmallIsRefused) {
  NvmeTestJob::Setup setup = SetupOf(/*is_durable=*/false);
  setup.cache_sections = storage::kSwapCacheSectionsMin - 1;
  NvmeTestJob job(std::move(setup));
  EXPECT_TRUE(absl::IsInvalidArgument(job.Open()));
}

// A durable job comes back with its parameters where they are.
TEST_F(NvmeParametersTest, APowerCutLosesNoParameter) {
  Start(/*is_durable=*/true);
  ASSERT_EQ(job_->RequestCommit(1), absl::OkStatus());
  ASSERT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
  WriteAll();
  const uint64_t before = bytes_read();
  ASSERT_EQ(job_->Restore(), absl::OkStatus());
  EXPECT_LE(bytes_read(), before);  // none is read for that
  for (uint32_t i = 0; i < kParameters; ++i) {
    EXPECT_EQ(Fetch(i), absl::OkStatus());
  }
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

}  // namespace
}  // namespace optstate::nvme
