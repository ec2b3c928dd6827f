// Verifying what is on disk, of a store at rest and of one in use.

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

using Kind = io::IoRequest::Kind;
using Progress = storage::VerifyProgress;
using Found = storage::VerifyResult;

constexpr size_t kRecordCount = 12;
// A record of two tiles of AdamW elements: two arrays of floats, and one
// parameter.
constexpr uint64_t kElements = 2 * kTileElements;
constexpr uint64_t kArrayBytes = kElements * 4;
// A slot of a durable job; the others have no parameters on disk.
constexpr uint64_t kSlotBytes = 3 * kArrayBytes;

bool GoOn(const Found& /*found*/) { return true; }

class NvmeVerifyTest : public testing::Test {
 protected:
  NvmeVerifyTest() : random_(layouts_.Uniform(0, UINT32_MAX)) {}

  // Makes a job of two parameters, records in two directories.
  void Start(bool is_durable) {
    job_ = nullptr;
    disk_ = std::make_unique<io::SimulatedDisk>(
        io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT32_MAX),
                                 .latency_us_max = 500,
                                 .folders = {"/disk", "/disk2"}});
    LayoutSpec spec;
    spec.groups.resize(1);
    for (const char* name : {"first", "second"}) {
      ParameterSpec parameter;
      parameter.name = name;
      parameter.numel = kRecordCount / 2 * kElements;
      parameter.shape = {parameter.numel};
      spec.parameters.push_back(parameter);
    }
    NvmeTestJob::Setup setup;
    setup.layout = *Layout::Make(std::move(spec));
    setup.sub_group_elements = kElements;
    setup.is_durable = is_durable;
    setup.directories = {"/disk", "/disk2"};
    setup.make_engine = [this] {
      return io::MakeSimulatedIoEngine(disk_.get());
    };
    job_ = std::make_unique<NvmeTestJob>(std::move(setup));
    ASSERT_EQ(job_->records(), kRecordCount);
    slot_bytes_ = is_durable ? kSlotBytes : 2 * kArrayBytes;
    ASSERT_EQ(job_->sizes().frame, slot_bytes_);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
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
  static std::string FileOf(size_t record) {
    return record % 2 == 0 ? "/disk/records" : "/disk2/records";
  }
  RecordPlace PlaceOf(size_t record) {
    return FrameTable(job_->table().span())
        .place(static_cast<uint32_t>(record));
  }
  // Damages a bit of a slot, or repairs it.
  void Flip(size_t record, uint32_t slot, uint64_t slots, uint64_t at,
            std::byte mask) {
    job_->Close();
    disk_->Flip(FileOf(record), (record / 2 * slots + slot) * slot_bytes_ + at,
                mask);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  std::unique_ptr<io::SimulatedDisk> disk_;
  std::unique_ptr<NvmeTestJob> job_;
  uint64_t slot_bytes_ = 0;
};

TEST_F(NvmeVerifyTest, AJobThatWasNeverWrittenHasNothingToVerify) {
  for (const bool is_durable : {false, true}) {
    Start(is_durable);
    const auto result = job_->store().Verify(&GoOn);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->progress.records, kRecordCount);
    EXPECT_EQ(result->progress.skipped, kRecordCount);
    EXPECT_EQ(result->progress.bytes_read, 0u);
  }
}

TEST_F(NvmeVerifyTest, AWholeJobIsReadOnce) {
  Start(/*is_durable=*/true);
  WriteAll();
  Commit(1);
  std::vector<Progress> seen;
  const auto result = job_->store().Verify([&seen](const Found& found) {
    seen.push_back(found.progress);
    return true;
  });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->progress.damaged, 0u);
  EXPECT_EQ(result->progress.skipped, 0u);
  EXPECT_EQ(result->progress.bytes_read, kRecordCount * kSlotBytes);
  ASSERT_EQ(seen.size(), kRecordCount);
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].records, i + 1);
    EXPECT_EQ(seen[i].records_total, kRecordCount);
  }
}

// Bits of each array, of each tile, and of the parameters.
TEST_F(NvmeVerifyTest, EachDamagedRegionIsFoundAndNamed) {
  Start(/*is_durable=*/true);
  WriteAll();
  Commit(1);
  for (int round = 0; round < 40; ++round) {
    const size_t record = layouts_.Uniform(0, kRecordCount - 1);
    const uint64_t array = layouts_.Uniform(0, 2);
    const uint64_t in_array = layouts_.Uniform(0, kArrayBytes - 1);
    const uint64_t at = array * kArrayBytes + in_array;
    const auto mask = static_cast<std::byte>(1 << layouts_.Uniform(0, 7));
    const uint32_t slot = PlaceOf(record).slot;
    Flip(record, slot, 2, at, mask);
    const auto result = job_->store().Verify(&GoOn);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->progress.damaged, 1u);
    EXPECT_EQ(result->progress.records, kRecordCount);
    ASSERT_EQ(result->damages.size(), 1u) << at;
    const storage::RecordDamage& damage = result->damages[0];
    EXPECT_EQ(damage.file, FileOf(record));
    EXPECT_EQ(damage.offset_bytes, (record / 2 * 2 + slot) * kSlotBytes);
    EXPECT_EQ(damage.bytes, kSlotBytes);
    const uint64_t tile = array == 2 ? 2 : in_array / 4 / kTileElements;
    EXPECT_EQ(damage.tile, static_cast<int64_t>(tile));
    EXPECT_EQ(damage.is_parameters, array == 2);
    const char* const name = record < kRecordCount / 2 ? "first" : "second";
    EXPECT_EQ(damage.first_parameter, name);
    EXPECT_EQ(damage.last_parameter, name);
    EXPECT_TRUE(absl::IsDataLoss(damage.status)) << damage.status;
    for (const std::string& text :
         {damage.file, absl::StrCat("byte ", damage.offset_bytes),
          absl::StrCat("\"", name, "\"")}) {
      EXPECT_NE(damage.status.message().find(text), std::string::npos)
          << damage.status;
    }
    Flip(record, slot, 2, at, mask);
  }
  EXPECT_EQ(job_->store().Verify(&GoOn)->progress.damaged, 0u);
}

// Slots of a durable job that the last commit does not name may hold anything.
TEST_F(NvmeVerifyTest, OnlyWhatIsToSurviveIsVerified) {
  Start(/*is_durable=*/true);
  WriteAll();
  Commit(1);
  Flip(3, 1 - PlaceOf(3).slot, 2, 5, std::byte{1});
  EXPECT_EQ(job_->store().Verify(&GoOn)->progress.damaged, 0u);
}

// A slot of a job that is not durable counts until its record is changed.
TEST_F(NvmeVerifyTest, WhatIsNewerInMemoryIsPassedOver) {
  Start(/*is_durable=*/false);
  WriteAll();
  size_t on_disk = 0;
  while (on_disk < kRecordCount &&
         (!PlaceOf(on_disk).is_on_disk || PlaceOf(on_disk).is_dirty)) {
    ++on_disk;
  }
  ASSERT_LT(on_disk, kRecordCount);
  Flip(on_disk, 0, 1, 7, std::byte{4});
  auto result = job_->store().Verify(&GoOn);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->progress.damaged, 1u);
  EXPECT_GT(result->progress.skipped, 0u);
  EXPECT_EQ(result->progress.bytes_read,
            (kRecordCount - result->progress.skipped) * 2 * kArrayBytes);
}

// A damaged record keeps the values that memory still has of it.
TEST_F(NvmeVerifyTest, ADamagedRecordInMemoryIsWrittenAnew) {
  for (const bool is_durable : {false, true}) {
    Start(is_durable);
    WriteAll();
    if (is_durable) Commit(1);
    ASSERT_EQ(job_->Compare(0), absl::OkStatus());
    const RecordPlace place = PlaceOf(0);
    ASSERT_NE(place.frame, RecordPlace::kNoFrame);
    ASSERT_TRUE(place.is_on_disk && !place.is_dirty);
    Flip(0, place.slot, is_durable ? 2 : 1, 9, std::byte{8});
    EXPECT_EQ(job_->store().Verify(&GoOn)->progress.damaged, 1u);
    EXPECT_TRUE(PlaceOf(0).is_dirty);
    if (is_durable) Commit(2);
    // These are read into the frames.
    for (size_t i = kRecordCount; i > 0; --i) {
      ASSERT_EQ(job_->Compare(i - 1), absl::OkStatus());
    }
    EXPECT_EQ(job_->store().Verify(&GoOn)->progress.damaged, 0u);
  }
}

// A move that finds the damage does the same, and is given up.
TEST_F(NvmeVerifyTest, AMoveKeepsWhatMemoryHasOfADamagedRecord) {
  const std::vector<std::string> directories = {"/disk", "/disk2"};
  for (const bool is_durable : {false, true}) {
    for (const bool is_unreadable : {false, true}) {
      SCOPED_TRACE(absl::StrCat(is_durable, " ", is_unreadable));
      Start(is_durable);
      WriteAll();
      if (is_durable) Commit(1);
      ASSERT_EQ(job_->Compare(0), absl::OkStatus());
      const RecordPlace place = PlaceOf(0);
      ASSERT_NE(place.frame, RecordPlace::kNoFrame);
      ASSERT_TRUE(place.is_on_disk && !place.is_dirty);
      if (is_unreadable) {
        job_->Close();
        disk_->AddFault({.kind = Kind::kRead,
                         .path = FileOf(0),
                         .begin = place.slot * slot_bytes_,
                         .end = (place.slot + 1) * slot_bytes_,
                         .times = io::SimulatedFault::kForever});
        ASSERT_EQ(job_->Open(), absl::OkStatus());
      } else {
        Flip(0, place.slot, is_durable ? 2 : 1, 9, std::byte{8});
      }
      ASSERT_EQ(job_->BeginMove(directories, {2, 1}), absl::OkStatus());
      const absl::Status moved = job_->store().CopyRecords();
      EXPECT_TRUE(absl::IsDataLoss(moved)) << moved;
      EXPECT_NE(moved.message().find(FileOf(0)), std::string::npos) << moved;
      job_->EndMove();
      EXPECT_TRUE(PlaceOf(0).is_dirty);
      job_->Close();
      disk_->ClearFaults();
      ASSERT_EQ(job_->Open(), absl::OkStatus());
      if (is_durable) Commit(2);
      // These are read into the frames.
      for (size_t i = kRecordCount; i > 0; --i) {
        ASSERT_EQ(job_->Compare(i - 1), absl::OkStatus());
      }
      ASSERT_EQ(job_->Rearrange(directories, {2, 1}), absl::OkStatus());
      EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
    }
  }
}

TEST_F(NvmeVerifyTest, AReadThatFailsIsADamageAfterItsLastAttempt) {
  Start(/*is_durable=*/true);
  WriteAll();
  Commit(1);
  io::SimulatedFault fault;
  fault.kind = Kind::kRead;
  fault.path = FileOf(0);
  fault.times = NvmeStore::kReadAttemptsMax - 1;
  disk_->AddFault(fault);
  EXPECT_EQ(job_->store().Verify(&GoOn)->progress.damaged, 0u);
  job_->Close();
  disk_->ClearFaults();
  fault.times = NvmeStore::kReadAttemptsMax;
  disk_->AddFault(fault);
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  const auto result = job_->store().Verify(&GoOn);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->damages.size(), 1u);
  EXPECT_EQ(result->damages[0].tile, -1);
  EXPECT_EQ(result->damages[0].file, FileOf(0));
  EXPECT_TRUE(absl::IsDataLoss(result->damages[0].status));
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

TEST_F(NvmeVerifyTest, ItEndsWhenItIsAskedTo) {
  Start(/*is_durable=*/true);
  WriteAll();
  Commit(1);
  const auto result = job_->store().Verify(
      [](const Found& found) { return found.progress.records < 4; });
  EXPECT_TRUE(absl::IsCancelled(result.status())) << result.status();
  EXPECT_NE(result.status().message().find("4 of 12"), std::string::npos);
  EXPECT_TRUE(job_->store().Verify(&GoOn).ok());
}

TEST_F(NvmeVerifyTest, ThereIsOneAtATime) {
  Start(/*is_durable=*/true);
  absl::Status second;
  ASSERT_TRUE(job_->store()
                  .Verify([&](const Found& /*found*/) {
                    second = job_->store().Verify(&GoOn).status();
                    return true;
                  })
                  .ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
}

TEST_F(NvmeVerifyTest, AStoreThatHasFailedSaysSo) {
  Start(/*is_durable=*/true);
  WriteAll();
  Commit(1);
  job_->Close();
  disk_->AddFault({.kind = Kind::kWrite,
                   .path = FileOf(0),
                   .times = io::SimulatedFault::kForever});
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  absl::Status failed;
  for (size_t i = 0; i < kRecordCount && failed.ok(); ++i) {
    failed = job_->Write(i, &random_);
  }
  if (failed.ok()) failed = job_->RequestCommit(2);
  if (failed.ok()) failed = job_->store().AwaitCommit();
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(job_->store().Verify(&GoOn).status(), failed);
}

// Training and commits go on, every byte as it should be, and none is taken for
// damaged.
TEST_F(NvmeVerifyTest, AStoreInUseIsNotDisturbed) {
  for (const bool is_durable : {false, true}) {
    Start(is_durable);
    WriteAll();
    std::atomic<bool> is_done = false;
    std::atomic<uint64_t> verified = 0;
    std::thread verifier([&] {
      while (!is_done) {
        const auto result = job_->store().Verify(&GoOn);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_EQ(result->progress.damaged, 0u) << result->damages[0].status;
        verified += result->progress.records - result->progress.skipped;
      }
    });
    const std::vector<uint8_t> all(kRecordCount, 1);
    for (uint64_t step = 1; step <= 60 || verified < 3 * kRecordCount; ++step) {
      const auto positions = job_->store().BeginPass(all);
      ASSERT_TRUE(positions.ok()) << positions.status();
      std::atomic<size_t> next = 0;
      const auto update = [&](uint64_t seed) {
        std::mt19937_64 random(seed);
        for (size_t i = next++; i < *positions; i = next++) {
          const auto pin = job_->store().PinOfPass(i);
          ASSERT_TRUE(pin.ok()) << pin.status();
          job_->WriteTo(*pin, &random);
        }
      };
      // Beside the pass, as a load does, also to records that are just summed.
      std::thread beside([&, seed = random_()] {
        std::mt19937_64 random(seed);
        while (next < *positions) {
          EXPECT_EQ(job_->Write(random() % kRecordCount, &random),
                    absl::OkStatus());
        }
      });
      std::thread other(update, random_());
      update(random_());
      other.join();
      beside.join();
      if (!is_durable) continue;
      ASSERT_EQ(job_->RequestCommit(step), absl::OkStatus());
    }
    is_done = true;
    verifier.join();
    EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
    if (!is_durable) continue;
    ASSERT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
    ASSERT_EQ(job_->Restore(), absl::OkStatus());
    EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  }
}

}  // namespace
}  // namespace optstate::nvme
