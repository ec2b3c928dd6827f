// Records that are split over directories, and counters by directory.

#include <cstdint>
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

constexpr size_t kRecordCount = 13;
constexpr uint64_t kSlotBytes = 3 * kTileElements * 4;

class NvmeDirectoriesTest : public testing::Test {
 protected:
  NvmeDirectoriesTest()
      : random_(layouts_.Uniform(0, UINT32_MAX)),
        disk_({.seed = layouts_.Uniform(0, UINT32_MAX),
               .latency_us_max = 500,
               .folders = {"/disk", "/disk2", "/disk3"}}) {}

  std::unique_ptr<NvmeTestJob> MakeJob(bool is_durable,
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

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  io::SimulatedDisk disk_;
};

TEST_F(NvmeDirectoriesTest, EachDirectoryHasItsShare) {
  const auto job = MakeJob(
      /*is_durable=*/false, {"/disk", "/disk2", "/disk3"});
  ASSERT_EQ(job->Open(), absl::OkStatus());
  WriteAll(job.get());
  EXPECT_EQ(job->CompareAll(), absl::OkStatus());
  job->Close();
  EXPECT_TRUE(HasBytes("/disk/records", 5 * kSlotBytes));
  EXPECT_TRUE(HasBytes("/disk2/records", 4 * kSlotBytes));
  EXPECT_TRUE(HasBytes("/disk3/records", 4 * kSlotBytes));
}

TEST_F(NvmeDirectoriesTest, CountersAreByDirectoryAndByPass) {
  const auto job = MakeJob(/*is_durable=*/true);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  const std::vector<uint8_t> all(kRecordCount, 1);
  std::vector<NvmeStore::Counters> counters;
  for (uint64_t step = 1; step <= 4; ++step) {
    const auto positions = job->store().BeginPass(all);
    ASSERT_TRUE(positions.ok());
    counters.push_back(job->store().counters());
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
  const NvmeStore::Counters end = job->store().counters();
  const std::vector<DirectoryCounters> directories =
      job->store().directory_counters();
  ASSERT_EQ(directories.size(), 2u);
  EXPECT_EQ(directories[0].reads + directories[1].reads, end.records_read);
  EXPECT_EQ(directories[0].bytes_read + directories[1].bytes_read,
            end.bytes_read);
  EXPECT_EQ(directories[1].writes, 4 * 6u);
  EXPECT_EQ(directories[1].bytes_written, 4 * 6 * kSlotBytes);
  // Four commits, and four syncs of their file.
  EXPECT_EQ(directories[0].writes, 4 * (7 + 1u));
  EXPECT_EQ(directories[0].syncs, 8u);
  EXPECT_EQ(directories[1].syncs, 4u);
  for (const DirectoryCounters& directory : directories) {
    EXPECT_EQ(directory.errors, 0u);
    EXPECT_EQ(directory.queue_depth, 0u);
  }
}

TEST_F(NvmeDirectoriesTest, ErrorsAreCounted) {
  const auto job = MakeJob(/*is_durable=*/false);
  ASSERT_EQ(job->Open(), absl::OkStatus());
  WriteAll(job.get());
  job->Close();
  disk_.AddFault({.kind = io::IoRequest::Kind::kRead,
                  .path = "/disk2/records",
                  .times = 2});
  ASSERT_EQ(job->Open(), absl::OkStatus());
  EXPECT_EQ(job->CompareAll(), absl::OkStatus());
  EXPECT_EQ(job->store().directory_counters()[0].errors, 0u);
  EXPECT_EQ(job->store().directory_counters()[1].errors, 2u);
}

}  // namespace
}  // namespace optstate::nvme
