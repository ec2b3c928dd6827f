// Tests damaged files and failing disks: every error is typed and says where,
// no thread waits for ever, and the last durable step stands.

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_faults_fixture.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

using NvmeStoreFaultsTest = NvmeFaultsFixture;

TEST_F(NvmeStoreFaultsTest, ADamagedRecordIsNamedAndOthersGoOn) {
  Start(/*is_durable=*/false);
  for (size_t record = 0; record < kRecordCount; record += 2) {
    // One slot for each record, and every second one is in this file. It has no
    // parameters, which are in memory alone.
    const uint64_t begin = record / 2 * kStateBytes;
    const uint64_t at = begin + layouts_.Uniform(0, kStateBytes - 1);
    const auto mask = static_cast<std::byte>(1 << layouts_.Uniform(0, 7));
    job_->Close();
    // Records in frames are not read.
    const FrameTable table(job_->table().span());
    if (table.place(static_cast<uint32_t>(record)).frame !=
        RecordPlace::kNoFrame) {
      ASSERT_EQ(job_->Open(), absl::OkStatus());
      continue;
    }
    disk_->Flip(kRecords, at, mask);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    const absl::Status damaged = job_->Compare(record);
    EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
    const std::string place =
        absl::StrCat(kRecords, ": the record at byte ", begin, " ");
    EXPECT_NE(damaged.message().find(place), std::string::npos) << damaged;
    EXPECT_NE(damaged.message().find("tile 0"), std::string::npos) << damaged;
    EXPECT_TRUE(absl::IsDataLoss(job_->Compare(record)));
    EXPECT_TRUE(absl::IsDataLoss(UseByThreads()));
    for (size_t i = 0; i < kRecordCount; ++i) {
      EXPECT_EQ(job_->Compare(i).ok(), i != record);
    }
    job_->Close();
    disk_->Flip(kRecords, at, mask);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  }
}

// The frame of a damaged record goes to a thread that waits for one.
TEST_F(NvmeStoreFaultsTest, ADamagedRecordKeepsNobodyWaiting) {
  Start(/*is_durable=*/false);
  for (size_t i : {1, 3, 5}) ASSERT_EQ(job_->Compare(i), absl::OkStatus());
  job_->Close();
  disk_->Flip(kRecords, 0, std::byte{1});
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  // One of three frames is left.
  const auto first = job_->store().PinSubGroup(3, Access::kRead);
  const auto second = job_->store().PinSubGroup(5, Access::kRead);
  ASSERT_TRUE(first.ok() && second.ok());
  for (int round = 0; round < 100; ++round) {
    std::thread damaged(
        [this] { EXPECT_TRUE(absl::IsDataLoss(job_->Compare(0))); });
    EXPECT_EQ(job_->Compare(7), absl::OkStatus());
    EXPECT_EQ(job_->Compare(9), absl::OkStatus());
    damaged.join();
  }
}

TEST_F(NvmeStoreFaultsTest, RestoringFindsDamagedParameters) {
  Start(/*is_durable=*/true);
  job_->Close();
  const uint64_t slot = ReadCommit()->places[0] & 1;
  disk_->Flip(kRecords, slot * kSlotBytes + kSlotBytes - 1, std::byte{1});
  const absl::Status damaged = job_->Restore();
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_NE(damaged.message().find("its parameters"), std::string::npos);
}

TEST_F(NvmeStoreFaultsTest, EachDamagedByteOfTheFirstSectorIsNoticed) {
  Start(/*is_durable=*/true);
  job_->Close();
  for (uint64_t at = 0; at < 32; ++at) {
    const auto mask = static_cast<std::byte>(1 << layouts_.Uniform(0, 7));
    disk_->Flip(kCommits, at, mask);
    const absl::Status status = ReadCommit().status();
    const bool is_version = at >= 8 && at < 16;
    EXPECT_EQ(status.code(), is_version ? absl::StatusCode::kFailedPrecondition
                                        : absl::StatusCode::kDataLoss)
        << at << ": " << status;
    EXPECT_NE(status.message().find(kCommits), std::string::npos) << status;
    EXPECT_EQ(job_->Open().code(), status.code()) << at;
    disk_->Flip(kCommits, at, mask);
  }
  EXPECT_EQ(ReadCommit()->step, 2u);
}

TEST_F(NvmeStoreFaultsTest, EachDamagedByteOfACommitIsNoticed) {
  Start(/*is_durable=*/true);
  job_->Close();
  // Each region has the last commit.
  const uint64_t region_bytes =
      (job_->sizes().disk - 2 * kRecordCount * kSlotBytes - 3 * kSector) / 2;
  const std::array<uint64_t, 2> regions = {kSector, kSector + region_bytes};
  for (uint64_t at = 0; at < 88 + kRecordCount + 4 * 2 * kRecordCount; ++at) {
    const auto mask = static_cast<std::byte>(1 << layouts_.Uniform(0, 7));
    disk_->Flip(kCommits, regions[0] + at, mask);
    const absl::StatusOr<storage::DurableCommit> copy = ReadCommit();
    ASSERT_TRUE(copy.ok()) << at << ": " << copy.status();
    EXPECT_EQ(copy->step, 2u) << at << ": a durable step is lost";
    disk_->Flip(kCommits, regions[1] + at, mask);
    EXPECT_FALSE(ReadCommit().ok()) << at;
    EXPECT_FALSE(absl::IsNotFound(ReadCommit().status())) << at;
    // The memory is whole, and can be made durable again.
    if (at % 16 == 0) {
      ASSERT_EQ(job_->Open(), absl::OkStatus());
      EXPECT_EQ(job_->store().durable_step(), 0u);
      job_->Close();
    }
    for (const uint64_t region : regions) {
      disk_->Flip(kCommits, region + at, mask);
    }
  }
  EXPECT_EQ(job_->Restore(), absl::OkStatus());
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

// A region that cannot be read may be the newest: the one before it must not
// be taken instead.
TEST_F(NvmeStoreFaultsTest, ACommitThatCannotBeReadIsNotPassedOver) {
  Start(/*is_durable=*/true);
  job_->Close();
  disk_->AddFault({.kind = Kind::kRead,
                   .path = kCommits,
                   .begin = kSector,
                   .end = kSector + 1,
                   .times = 2});
  EXPECT_EQ(ReadCommit()->step, 2u);
  disk_->AddFault({.kind = Kind::kRead,
                   .path = kCommits,
                   .begin = kSector,
                   .end = kSector + 1,
                   .times = kForever});
  EXPECT_TRUE(absl::IsDataLoss(ReadCommit().status()));
}

TEST_F(NvmeStoreFaultsTest, DamageOfTheFrameTableIsNoticed) {
  Start(/*is_durable=*/true);
  job_->Close();
  const absl::Span<std::byte> table = job_->table().span();
  const uint64_t checksums = 64 + 8 * kRecordCount;
  for (uint64_t at = 0; at < table.size(); ++at) {
    const auto mask = static_cast<std::byte>(1 << layouts_.Uniform(0, 7));
    table[at] ^= mask;
    absl::Status status = job_->Open();
    // The number of frames is set anew, and a sync that was lost costs no more
    // than time.
    const bool is_harmless = at >= 56 && at < 64;
    if (at < checksums && !is_harmless) {
      EXPECT_TRUE(absl::IsDataLoss(status)) << at << ": " << status;
      EXPECT_NE(status.message().find("frame_table"), std::string::npos);
    } else {
      EXPECT_EQ(status, absl::OkStatus()) << at;
      status = job_->CompareAll();
      EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << status;
    }
    job_->Close();
    if (at < 56 || at >= 64) table[at] ^= mask;
  }
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

TEST_F(NvmeStoreFaultsTest, MissingAndShortFilesAreDataLoss) {
  for (const std::string& path :
       {std::string(kRecords), std::string("/disk2/records"),
        std::string(kCommits)}) {
    for (const uint64_t bytes : {uint64_t{0}, kSector, 3 * kSector}) {
      MakeDisk(UINT64_MAX);
      Start(/*is_durable=*/true);
      job_->Close();
      disk_->Truncate(path, bytes);
      const absl::Status status = job_->Open();
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_NE(status.message().find(path), std::string::npos) << status;
      EXPECT_TRUE(absl::IsDataLoss(job_->Restore()));
    }
    MakeDisk(UINT64_MAX);
    Start(/*is_durable=*/true);
    job_->Close();
    disk_->LoseFile(path);
    const absl::Status status = job_->Open();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_NE(status.message().find(path), std::string::npos) << status;
    EXPECT_NE(status.message().find("mounted"), std::string::npos) << status;
  }
}

// The first commit, and the file's making, may be cut short by a power cut.
TEST_F(NvmeStoreFaultsTest, AJobThatWasNeverDurableIsNotFound) {
  job_ = std::make_unique<NvmeTestJob>(SetupOf(/*is_durable=*/true));
  EXPECT_TRUE(absl::IsNotFound(ReadCommit().status()));
  const auto engine = io::MakeSimulatedIoEngine(disk_.get());
  const auto file =
      engine->Open(kCommits, 9 * kSector, io::IoEngine::OpenMode::kCreate);
  ASSERT_TRUE(file.ok());
  engine->Close(*file);
  EXPECT_TRUE(absl::IsNotFound(ReadCommit().status()));
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  job_->Close();
  EXPECT_TRUE(absl::IsNotFound(ReadCommit().status()));
}

TEST_F(NvmeStoreFaultsTest, AFailedReadIsTriedAgain) {
  Start(/*is_durable=*/false);
  ReopenWith({.kind = Kind::kRead, .path = kRecords, .times = 2});
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  ReopenWith({.kind = Kind::kRead, .path = kRecords, .times = kForever});
  for (int round = 0; round < 2; ++round) {
    size_t failed = 0;
    for (size_t i = 0; i < kRecordCount; ++i) {
      const absl::Status status = job_->Compare(i);
      if (status.ok()) continue;
      ++failed;
      EXPECT_EQ(i % 2, 0u);
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_NE(status.message().find(kRecords), std::string::npos) << status;
    }
    EXPECT_GE(failed, kRecordCount / 2 - NvmeStore::kFramesMin);
    EXPECT_TRUE(absl::IsDataLoss(UseByThreads()));
  }
  ReopenWithoutFaults();
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

// A read ahead that fails must not fail a later pass, when the disk reads
// again.
TEST_F(NvmeStoreFaultsTest, AnErrorOfAFormerPassIsForgotten) {
  Start(/*is_durable=*/false);
  ReopenWith({.kind = Kind::kRead, .times = 3});
  const std::vector<uint8_t> all(kRecordCount, 1);
  ASSERT_TRUE(job_->store().BeginPass(all).ok());
  for (size_t i = 0; i < kRecordCount; ++i) {
    job_->store().PinOfPass(i).status().IgnoreError();
  }
  const auto positions = job_->store().BeginPass(all);
  ASSERT_TRUE(positions.ok());
  for (size_t i = 0; i < *positions; ++i) {
    EXPECT_EQ(job_->store().PinOfPass(i).status(), absl::OkStatus());
  }
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

TEST_F(NvmeStoreFaultsTest, AFailedWriteEndsTheStoreAndLosesNothing) {
  for (const int error : {EIO, ENOSPC, ENODEV}) {
    for (const uint64_t skip : {0, 1, 7}) {
      MakeDisk(UINT64_MAX);
      Start(/*is_durable=*/true);
      ReopenWith({.kind = Kind::kWrite,
                  .path = kRecords,
                  .skip = skip,
                  .times = kForever,
                  .error_number = error});
      absl::Status status;
      while (status.ok()) status = UseByThreads();
      EXPECT_EQ(status.code(), error == EIO ? absl::StatusCode::kDataLoss
                               : error == ENOSPC
                                   ? absl::StatusCode::kResourceExhausted
                                   : absl::StatusCode::kUnavailable)
          << status;
      EXPECT_NE(status.message().find(kRecords), std::string::npos) << status;
      EXPECT_EQ(job_->store().BeginPass({}).status(), status);
      EXPECT_EQ(job_->RequestCommit(3), status);
      EXPECT_EQ(job_->store().AwaitCommit(), status);
      ReopenWithoutFaults();
      EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
      EXPECT_EQ(job_->store().durable_step(), 2u);
      ASSERT_EQ(job_->Restore(), absl::OkStatus());
      EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
    }
  }
}

TEST_F(NvmeStoreFaultsTest, AFailedCommitLeavesTheOneBefore) {
  for (const Kind kind : {Kind::kWrite, Kind::kSync}) {
    for (const std::string& path :
         {std::string("/disk2/records"), std::string(kCommits)}) {
      MakeDisk(UINT64_MAX);
      Start(/*is_durable=*/true);
      // Opening writes and syncs both copies of the last commit.
      const uint64_t skip = path == kCommits ? kCommitCopies : 0;
      ReopenWith({.kind = kind, .path = path, .skip = skip});
      absl::Status status;
      for (size_t i = 0; i < kRecordCount && status.ok(); ++i) {
        status = job_->Write(i, &random_);
      }
      if (status.ok()) status = job_->RequestCommit(3);
      if (status.ok()) status = job_->store().AwaitCommit();
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_NE(status.message().find(path), std::string::npos) << status;
      EXPECT_EQ(job_->store().durable_step(), 2u);
      job_->Close();
      disk_->ClearFaults();
      // The crash loses all writes that were not synced.
      const auto cut = disk_->Crash([](const io::CrashSector&) { return 0; });
      job_->SetEngineMaker(
          [&cut] { return io::MakeSimulatedIoEngine(cut.get()); });
      ASSERT_EQ(job_->Restore(), absl::OkStatus());
      EXPECT_EQ(job_->store().durable_step(), 2u);
      EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
      job_ = nullptr;
    }
  }
}

// A record that is read while a commit wants it on disk is written when its
// readers are done, and a writer waits for that.
TEST_F(NvmeStoreFaultsTest, ACommitGoesOnBesideReaders) {
  Start(/*is_durable=*/true);
  ASSERT_EQ(job_->Write(5, &random_), absl::OkStatus());
  std::thread writer;
  {
    const auto pin = job_->store().PinSubGroup(5, Access::kRead);
    ASSERT_TRUE(pin.ok());
    ASSERT_EQ(job_->RequestCommit(3), absl::OkStatus());
    writer = std::thread([this, seed = random_()] {
      std::mt19937_64 random(seed);
      EXPECT_EQ(job_->Write(5, &random), absl::OkStatus());
    });
    EXPECT_TRUE(job_->store().PinSubGroup(5, Access::kRead).ok());
  }
  EXPECT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
  writer.join();
  ASSERT_EQ(job_->Restore(), absl::OkStatus());
  EXPECT_EQ(job_->store().durable_step(), 3u);
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

TEST_F(NvmeStoreFaultsTest, TheFilesOfAnotherEngineAreLeftAlone) {
  Start(/*is_durable=*/true);
  NvmeTestJob other(SetupOf(/*is_durable=*/true));
  other.CopyMemoryOf(job_.get());
  const absl::Status locked = other.Open();
  EXPECT_TRUE(absl::IsUnavailable(locked)) << locked;
  EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
}

TEST_F(NvmeStoreFaultsTest, ADiskWithoutRoomIsLeftEmpty) {
  const NvmeTestJob sized(SetupOf(/*is_durable=*/true));
  const uint64_t records = 2 * kRecordCount * kSlotBytes;
  for (const uint64_t capacity :
       {uint64_t{0}, records / 2, records, records + kSector}) {
    MakeDisk(capacity);
    NvmeTestJob job(SetupOf(/*is_durable=*/true));
    const absl::Status status = job.Open();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    for (const char* path : {kRecords, "/disk2/records", kCommits}) {
      EXPECT_FALSE(disk_->Exists(path)) << path;
    }
  }
  MakeDisk(sized.sizes().disk);
  Start(/*is_durable=*/true);
}

}  // namespace
}  // namespace optstate::nvme
