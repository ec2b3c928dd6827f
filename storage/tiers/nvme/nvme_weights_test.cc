// Records that are split over directories by weight, and counters by directory.

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

using Weights = std::vector<uint32_t>;

constexpr size_t kRecordCount = 12;
// A slot of a durable job; the others have no parameters on disk.
constexpr uint64_t kSlotBytes = 3 * kTileElements * 4;

class NvmeWeightsTest : public testing::Test {
 protected:
  NvmeWeightsTest()
      : random_(layouts_.Uniform(0, UINT32_MAX)),
        disk_({.seed = layouts_.Uniform(0, UINT32_MAX),
               .latency_us_max = 500,
               .folders = {"/disk", "/disk2", "/disk3"}}) {}

  std::unique_ptr<NvmeTestJob> MakeJob(const Weights& weights, bool is_durable,
                                       std::vector<std::string> directories = {
                                           "/disk", "/disk2"}) {
    LayoutSpec spec;
    spec.groups.resize(1);
    ParameterSpec parameter;
    parameter.name = "a";
    parameter.numel = kRecordCount * kTileElements;
    parameter.shape = {parameter.numel};
    spec.parameters = {parameter};
    NvmeTestJob::Setup setup;
    setup.layout = *Layout::Make(std::move(spec));
    setup.sub_group_elements = kTileElements;
    setup.is_durable = is_durable;
    setup.directories = std::move(directories);
    setup.weights = weights;
    setup.make_engine = [this] { return io::MakeSimulatedIoEngine(&disk_); };
    return std::make_unique<NvmeTestJob>(std::move(setup));
  }
  void WriteAll(NvmeTestJob* job) {
    for (size_t i = 0; i < kRecordCount; ++i) {
      ASSERT_EQ(job->Write(i, &random_), absl::OkStatus());
    }
  }
  void Commit(NvmeTestJob* job, uint64_t step) {
    ASSERT_EQ(job->RequestCommit(step), absl::OkStatus());
    ASSERT_EQ(job->store().AwaitCommit(), absl::OkStatus());
  }
  // Says whether a file has so many bytes and no more.
  bool HasBytes(const std::string& path, uint64_t bytes) {
    const auto engine = io::MakeSimulatedIoEngine(&disk_);
    const auto has = [&](uint64_t least) {
      const auto file =
          engine->Open(path, least, io::IoEngine::OpenMode::kOpen);
      if (file.ok()) engine->Close(*file);
      return file.ok();
    };
    return has(bytes) && !has(bytes + io::kSectorBytes);
  }
  // The version of the table, and of the region of the first commit.
  static uint32_t TableVersion(NvmeTestJob* job) {
    uint32_t version;
    std::memcpy(&version, job->table().span().data() + 8, sizeof(version));
    return version;
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  io::SimulatedDisk disk_;
};

TEST_F(NvmeWeightsTest, EachDirectoryHasItsShare) {
  const auto job = MakeJob({6, 2}, /*is_durable=*/false);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  WriteAll(job.get());
  EXPECT_EQ(job->CompareAll(), absl::OkStatus());
  job->Close();
  EXPECT_TRUE(HasBytes("/disk/records", 9 * job->sizes().frame));
  EXPECT_TRUE(HasBytes("/disk2/records", 3 * job->sizes().frame));
}

// The bytes of jobs with equal parts are those of former builds.
TEST_F(NvmeWeightsTest, EqualWeightsAreNone) {
  const auto none = MakeJob({}, /*is_durable=*/true);
  const auto equal = MakeJob({7, 7}, /*is_durable=*/true);
  const auto weighted = MakeJob({7, 6}, /*is_durable=*/true);
  EXPECT_EQ(none->sizes().table, equal->sizes().table);
  EXPECT_EQ(none->sizes().disk, equal->sizes().disk);
  EXPECT_EQ(none->sizes().table + 8, weighted->sizes().table);
  ASSERT_EQ(equal->Open(), absl::OkStatus());
  EXPECT_EQ(TableVersion(equal.get()), 1u);
  equal->Close();
  none->CopyMemoryOf(equal.get());
  EXPECT_EQ(none->Open(), absl::OkStatus());
}

TEST_F(NvmeWeightsTest, AJobKeepsTheWeightsThatItWasMadeWith) {
  const auto job = MakeJob({3, 1}, /*is_durable=*/true);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  EXPECT_EQ(TableVersion(job.get()), 2u);
  WriteAll(job.get());
  Commit(job.get(), 1);
  WriteAll(job.get());
  Commit(job.get(), 2);
  for (const Weights& weights : {Weights{}, Weights{3, 1}, Weights{9, 3}}) {
    job->Close();
    job->SetWeights(weights);
    // The job opens with its memory, and without.
    ASSERT_EQ(job->Open(), absl::OkStatus());
    EXPECT_EQ(job->CompareAll(), absl::OkStatus());
    job->Close();
    ASSERT_EQ(job->Restore(), absl::OkStatus());
    EXPECT_EQ(job->CompareAll(), absl::OkStatus());
  }
  job->Close();
  for (const bool has_memory : {true, false}) {
    for (const Weights& weights : {Weights{1, 3}, Weights{1, 1}}) {
      job->SetWeights(weights);
      const absl::Status refused = has_memory ? job->Open() : job->Restore();
      EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
      EXPECT_NE(refused.message().find("3:1"), std::string::npos) << refused;
    }
  }
}

TEST_F(NvmeWeightsTest, AJobOfEqualPartsStaysOne) {
  const auto job = MakeJob({}, /*is_durable=*/false);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  job->Close();
  job->SetWeights({2, 1});
  EXPECT_TRUE(absl::IsFailedPrecondition(job->Open()));
  job->SetWeights({2, 2});
  EXPECT_EQ(job->Open(), absl::OkStatus());
}

TEST_F(NvmeWeightsTest, WeightsThatDoNotFitAreRefused) {
  for (const Weights& weights : {Weights{0, 1}, Weights{1}, Weights{1, 2, 3}}) {
    const auto job = MakeJob({}, /*is_durable=*/false);
    job->SetWeights(weights);
    EXPECT_TRUE(absl::IsInvalidArgument(job->Open()));
    EXPECT_FALSE(disk_.Exists("/disk/records"));
  }
  // A table without room for them.
  const auto job = MakeJob({}, /*is_durable=*/false);
  job->SetWeights({2, 1});
  EXPECT_TRUE(absl::IsInvalidArgument(job->Open()));
}

// Each bit of the weights in memory and on disk is covered by a checksum.
TEST_F(NvmeWeightsTest, DamagedWeightsAreNoticed) {
  const auto job = MakeJob({3, 1}, /*is_durable=*/true);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  WriteAll(job.get());
  Commit(job.get(), 1);
  job->Close();
  const absl::Span<std::byte> table = job->table().span();
  job->SetWeights({});
  for (uint64_t at = table.size() - 8; at < table.size(); ++at) {
    const auto mask = static_cast<std::byte>(1 << layouts_.Uniform(0, 7));
    table[at] ^= mask;
    const absl::Status damaged = job->Open();
    EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
    table[at] ^= mask;
  }
  ASSERT_EQ(job->Open(), absl::OkStatus());
  job->Close();
  // Both regions have the commit: the weights follow the job's text, which ends
  // with the step.
  const uint64_t region = (job->sizes().disk - 2 * kRecordCount * kSlotBytes -
                           3 * io::kSectorBytes) /
                          2;
  const std::vector<std::byte> bytes =
      disk_.Read("/disk/commits", io::kSectorBytes + region, region);
  uint64_t job_bytes;
  std::memcpy(&job_bytes, &bytes[72], sizeof(job_bytes));
  const uint64_t weights = 88 + kRecordCount + 4 * 2 * kRecordCount + job_bytes;
  uint32_t first;
  std::memcpy(&first, &bytes[weights], sizeof(first));
  EXPECT_EQ(first, 3u);
  for (uint64_t at = weights; at < weights + 8; ++at) {
    const auto flip = [&] {
      for (const uint64_t begin :
           {io::kSectorBytes, io::kSectorBytes + region}) {
        disk_.Flip("/disk/commits", begin + at, std::byte{2});
      }
    };
    flip();
    EXPECT_FALSE(job->Restore().ok());
    flip();
  }
  ASSERT_EQ(job->Restore(), absl::OkStatus());
  EXPECT_EQ(job->CompareAll(), absl::OkStatus());
}

TEST_F(NvmeWeightsTest, CountersAreByDirectoryAndByPass) {
  const auto job = MakeJob({3, 1}, /*is_durable=*/true);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  const std::vector<uint8_t> all(kRecordCount, 1);
  std::vector<storage::SwapCounters> counters;
  for (uint64_t step = 1; step <= 4; ++step) {
    const auto positions = job->store().BeginPass(all);
    ASSERT_TRUE(positions.ok());
    counters.push_back(job->store().swap_state()->counters);
    for (size_t i = 0; i < *positions; ++i) {
      const auto pin = job->store().PinOfPass(i);
      ASSERT_TRUE(pin.ok()) << pin.status();
      job->WriteTo(*pin, &random_);
    }
    Commit(job.get(), step);
  }
  for (size_t i = 1; i < counters.size(); ++i) {
    EXPECT_EQ(counters[i].passes, i + 1);
    EXPECT_EQ(counters[i].last_pass.bytes_read,
              counters[i].bytes_read - counters[i - 1].bytes_read);
    EXPECT_EQ(counters[i].last_pass.bytes_written,
              counters[i].bytes_written - counters[i - 1].bytes_written);
    EXPECT_GT(counters[i].last_pass.cpu_ns, 0u);
    EXPECT_GE(counters[i].cpu_ns, counters[i].last_pass.cpu_ns);
  }
  // Each step writes all records, and each pass reads those that are in no
  // frame.
  EXPECT_EQ(counters[3].last_pass.bytes_written, kRecordCount * kSlotBytes);
  const storage::SwapCounters end = job->store().swap_state()->counters;
  const std::vector<storage::DirectoryCounters> directories =
      job->store().swap_state()->directories;
  ASSERT_EQ(directories.size(), 2u);
  EXPECT_EQ(directories[0].reads + directories[1].reads, end.records_read);
  EXPECT_EQ(directories[0].bytes_read + directories[1].bytes_read,
            end.bytes_read);
  EXPECT_EQ(directories[1].writes, 4 * 3u);
  EXPECT_EQ(directories[1].bytes_written, 4 * 3 * kSlotBytes);
  // Four commits in two copies, and a sync of their file after each.
  EXPECT_EQ(directories[0].writes, 4 * (9 + 2u));
  EXPECT_EQ(directories[0].syncs, 4 * (1 + 2u));
  EXPECT_EQ(directories[1].syncs, 4u);
  for (const storage::DirectoryCounters& directory : directories) {
    EXPECT_EQ(directory.errors, 0u);
    EXPECT_EQ(directory.queue_depth, 0u);
  }
}

TEST_F(NvmeWeightsTest, ErrorsAreCounted) {
  const auto job = MakeJob({}, /*is_durable=*/false);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  WriteAll(job.get());
  job->Close();
  disk_.AddFault({.kind = io::IoRequest::Kind::kRead,
                  .path = "/disk2/records",
                  .times = 2});
  ASSERT_EQ(job->Open(), absl::OkStatus());
  EXPECT_EQ(job->CompareAll(), absl::OkStatus());
  EXPECT_EQ(job->store().swap_state()->directories[0].errors, 0u);
  EXPECT_EQ(job->store().swap_state()->directories[1].errors, 2u);
}

}  // namespace
}  // namespace optstate::nvme
