#include "storage/block_device/extents.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/file.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "storage/disk_folder.h"

namespace optstate::storage {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class ExtentsTest : public testing::Test {
 protected:
  ExtentsTest() {
    std::string name = testing::TempDir() + "/extents-XXXXXX";
    directory_ = ::mkdtemp(name.data());
    std::filesystem::create_directory(directory_ + kDiskJobsFolder);
    device_.device_id = "d";
    device_.device_bytes = 10 * kMiB;
  }
  ~ExtentsTest() override { std::filesystem::remove_all(directory_); }

  // Makes a job's folder.
  std::string Folder(const std::string& job) const {
    const std::string folder = DiskFolder(directory_, job);
    std::filesystem::create_directory(folder);
    return folder;
  }
  absl::StatusOr<io::Extent> Allocate(const std::string& job,
                                      uint64_t bytes) const {
    return AllocateExtent(directory_, Folder(job), device_, bytes);
  }
  // Returns where an extent that must be had begins, in MiB.
  uint64_t BeginOf(const std::string& job, uint64_t bytes) const {
    const auto extent = Allocate(job, bytes);
    EXPECT_TRUE(extent.ok()) << extent.status();
    if (!extent.ok()) return 0;
    EXPECT_EQ(extent->bytes, bytes);
    EXPECT_EQ(*ReadDiskExtent(Folder(job)),
              (DiskExtent{device_.device_id, *extent}));
    EXPECT_EQ(extent->begin_bytes % kMiB, 0u);
    return extent->begin_bytes / kMiB;
  }

  std::string directory_;
  Superblock device_;
};

TEST_F(ExtentsTest, TheFirstPartThatIsLargeEnough) {
  EXPECT_FALSE(*HasExtents(directory_));
  EXPECT_EQ(BeginOf("a", 2 * kMiB), 1u);
  EXPECT_EQ(BeginOf("b", kMiB + 4096), 3u);
  EXPECT_EQ(BeginOf("c", 2 * kMiB), 5u) << "behind the rounded end of b";
  EXPECT_EQ(*FreeBytes(directory_, device_), 3 * kMiB);
  std::filesystem::remove_all(Folder("b"));
  EXPECT_EQ(BeginOf("d", 3 * kMiB), 7u);
  EXPECT_EQ(BeginOf("e", 2 * kMiB), 3u) << "where b was";
  EXPECT_EQ(*FreeBytes(directory_, device_), 0u);
}

TEST_F(ExtentsTest, AFreePartIsBorrowedWhileNobodyAllocates) {
  EXPECT_EQ(BeginOf("a", 4 * kMiB), 1u);
  EXPECT_EQ(BeginOf("b", 1 * kMiB), 5u);
  std::filesystem::remove_all(Folder("a"));
  std::thread allocating;
  std::atomic<bool> is_allocated = false;
  {
    const auto part = BorrowFreePart(directory_, device_, kMiB, 3 * kMiB);
    ASSERT_TRUE(part.ok()) << part.status();
    EXPECT_EQ(part->extent, (io::Extent{1 * kMiB, 3 * kMiB}));
    allocating = std::thread([&] {
      EXPECT_EQ(BeginOf("c", kMiB), 1u);
      is_allocated = true;
    });
    // Another opener of the lock's file is refused it all the while.
    const UniqueFd lock(
        ::open((directory_ + "/extents.lock").c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(lock.ok());
    EXPECT_EQ(::flock(lock.get(), LOCK_EX | LOCK_NB), -1);
    EXPECT_FALSE(is_allocated);
  }
  allocating.join();
  const auto rest = BorrowFreePart(directory_, device_, kMiB, 9 * kMiB);
  ASSERT_TRUE(rest.ok()) << rest.status();
  EXPECT_EQ(rest->extent, (io::Extent{6 * kMiB, 4 * kMiB})) << "the largest";
}

TEST_F(ExtentsTest, NoFreePartIsWorthBorrowing) {
  EXPECT_EQ(BeginOf("a", 8 * kMiB), 1u);
  const absl::Status status =
      BorrowFreePart(directory_, device_, 2 * kMiB, 3 * kMiB).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(status.message(),
            "the device of " + directory_ +
                " has no free part of 2097152 bytes: the largest one has "
                "1048576");
}

TEST_F(ExtentsTest, NoneIsLargeEnough) {
  EXPECT_EQ(BeginOf("a", 4 * kMiB), 1u);
  EXPECT_EQ(BeginOf("b", 1 * kMiB), 5u);
  std::filesystem::remove_all(Folder("a"));
  const absl::Status status = Allocate("c", 5 * kMiB).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(status.message(),
            "the device of " + directory_ +
                ": the job needs 5242880 bytes of it in one piece, the largest "
                "free one has 4194304 (8388608 are free in all): delete a job, "
                "or use a larger device");
  EXPECT_EQ(*ReadDiskExtent(Folder("c")), std::nullopt);
}

TEST_F(ExtentsTest, AJobThatHasOneGetsAnotherInItsPlace) {
  EXPECT_EQ(BeginOf("a", 8 * kMiB), 1u);
  EXPECT_EQ(BeginOf("a", 9 * kMiB), 1u);
}

TEST_F(ExtentsTest, AFolderThatIsBeingRemovedKeepsItsExtent) {
  EXPECT_EQ(BeginOf("a", 2 * kMiB), 1u);
  std::filesystem::rename(Folder("a"), DiskFolder(directory_, ".deleted-1"));
  EXPECT_EQ(BeginOf("b", 2 * kMiB), 3u);
}

TEST_F(ExtentsTest, ExtentsOfAnotherDeviceAreNotInTheWay) {
  EXPECT_EQ(BeginOf("a", 2 * kMiB), 1u);
  device_.device_id = "another";
  EXPECT_EQ(BeginOf("b", 2 * kMiB), 1u);
}

TEST_F(ExtentsTest, NothingIsAllocatedWhileAnExtentCannotBeRead) {
  std::ofstream(Folder("a") + kDiskExtentFile) << "nonsense";
  EXPECT_TRUE(absl::IsDataLoss(Allocate("b", kMiB).status()));
  EXPECT_TRUE(absl::IsDataLoss(HasExtents(directory_).status()));
}

TEST_F(ExtentsTest, NothingIsAllocatedWhileAnExtentIsNotOnTheDevice) {
  constexpr uint64_t kEnd = uint64_t{1} << 63;
  const io::Extent extents[] = {
      {0, kMiB},           {9 * kMiB, 2 * kMiB},    {20 * kMiB, kMiB},
      {kEnd, kEnd - kMiB}, {kMiB, kEnd + 4 * kMiB}, {kEnd, kMiB}};
  for (const io::Extent& extent : extents) {
    ASSERT_TRUE(WriteDiskExtent(Folder("a"), {device_.device_id, extent}).ok());
    EXPECT_TRUE(absl::IsDataLoss(Allocate("b", kMiB).status()))
        << extent.begin_bytes << " " << extent.bytes;
    EXPECT_TRUE(absl::IsDataLoss(FreeBytes(directory_, device_).status()));
  }
}

TEST_F(ExtentsTest, ThoseThatAllocateAtOnceGetDifferentExtents) {
  device_.device_bytes = 64 * kMiB;
  constexpr int kJobs = 12;
  std::vector<uint64_t> begins(kJobs);
  std::vector<std::thread> threads;
  for (int i = 0; i < kJobs; ++i) {
    threads.emplace_back(
        [&, i] { begins[i] = BeginOf(std::to_string(i), 3 * kMiB); });
  }
  for (std::thread& thread : threads) thread.join();
  std::sort(begins.begin(), begins.end());
  for (int i = 0; i < kJobs; ++i) EXPECT_EQ(begins[i], 1 + 3u * i);
}

}  // namespace
}  // namespace optstate::storage
