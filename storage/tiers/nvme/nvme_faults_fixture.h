#ifndef OPTSTATE_STORAGE_TIERS_NVME_NVME_FAULTS_FIXTURE_H_
#define OPTSTATE_STORAGE_TIERS_NVME_NVME_FAULTS_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {

using Access = storage::StateStore::Access;
using Effect = io::SimulatedFault::Effect;
using Kind = io::IoRequest::Kind;

inline constexpr uint64_t kForever = io::SimulatedFault::kForever;
inline constexpr uint64_t kSector = io::kSectorBytes;
inline constexpr char kRecords[] = "/disk/records";
inline constexpr char kCommits[] = "/disk/commits";

// A record of 4096 AdamW elements: two arrays of floats, and, of a durable job,
// one parameter.
inline constexpr uint64_t kStateBytes = 2 * 4096 * 4;
inline constexpr uint64_t kSlotBytes = kStateBytes + 4096 * 4;

// A job over two directories of a simulated disk, whose calls fail.
class NvmeFaultsFixture : public testing::Test {
 protected:
  static constexpr size_t kRecordCount = 12;

  NvmeFaultsFixture() : random_(layouts_.Uniform(0, UINT32_MAX)) {
    MakeDisk(UINT64_MAX);
  }

  void MakeDisk(uint64_t capacity_bytes) {
    job_ = nullptr;
    disk_ = std::make_unique<io::SimulatedDisk>(
        io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT32_MAX),
                                 .capacity_bytes = capacity_bytes,
                                 .latency_us_max = 500,
                                 .folders = {"/disk", "/disk2"}});
  }

  NvmeTestJob::Setup SetupOf(bool is_durable) {
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
    setup.directories = {"/disk", "/disk2"};
    setup.make_engine = [this] {
      return io::MakeSimulatedIoEngine(disk_.get());
    };
    return setup;
  }

  // Makes a job of which every record has been written, and is on disk but for
  // a few.
  void Start(bool is_durable) {
    job_ = std::make_unique<NvmeTestJob>(SetupOf(is_durable));
    ASSERT_EQ(job_->records(), kRecordCount);
    ASSERT_EQ(job_->sizes().frame, is_durable ? kSlotBytes : kStateBytes);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    WriteAll();
    if (is_durable) {
      Commit(1);
      WriteAll();
      Commit(2);
    }
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
  }
  void WriteAll() {
    for (size_t i = 0; i < kRecordCount; ++i) {
      ASSERT_EQ(job_->Write(i, &random_), absl::OkStatus());
    }
  }
  void Commit(uint64_t step) {
    ASSERT_EQ(job_->RequestCommit(step), absl::OkStatus());
    ASSERT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
  }
  void Reopen() {
    job_->Close();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
  }
  void ReopenWith(io::SimulatedFault fault) {
    job_->Close();
    disk_->AddFault(std::move(fault));
    ASSERT_EQ(job_->Open(), absl::OkStatus());
  }
  void ReopenWithoutFaults() {
    job_->Close();
    disk_->ClearFaults();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
  }
  absl::StatusOr<storage::DurableCommit> ReadCommit() {
    const auto engine = io::MakeSimulatedIoEngine(disk_.get());
    return NvmeStore::ReadCommit(engine.get(), job_->setup().directories);
  }
  // Reads and writes all records by more threads than there are frames.
  // Returns the first error.
  absl::Status UseByThreads() {
    std::vector<absl::Status> statuses(6);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < statuses.size(); ++t) {
      threads.emplace_back([&, t, seed = random_()] {
        std::mt19937_64 random(seed);
        for (int i = 0; i < 40; ++i) {
          const size_t record = random() % kRecordCount;
          statuses[t].Update(random() % 2 == 0 ? job_->Write(record, &random)
                                               : job_->Compare(record));
        }
      });
    }
    absl::Status status;
    for (size_t t = 0; t < statuses.size(); ++t) {
      threads[t].join();
      status.Update(statuses[t]);
    }
    return status;
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  std::unique_ptr<io::SimulatedDisk> disk_;
  std::unique_ptr<NvmeTestJob> job_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_NVME_FAULTS_FIXTURE_H_
