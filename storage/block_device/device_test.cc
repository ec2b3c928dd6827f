#include "storage/block_device/device.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "storage/block_device/device_format.h"
#include "storage/block_device/extents.h"
#include "storage/disk_folder.h"
#include "storage/testing/loop_device.h"

namespace optstate::storage {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kDeviceBytes = 8 * kMiB;

// Two directories and a file that stands for a device.
class DeviceTest : public testing::Test {
 protected:
  DeviceTest() {
    std::string name = testing::TempDir() + "/device-XXXXXX";
    root_ = ::mkdtemp(name.data());
    for (const std::string& directory : {directory(), other()}) {
      std::filesystem::create_directories(directory + kDiskJobsFolder);
    }
    MakeFile("device", kDeviceBytes);
  }
  ~DeviceTest() override { std::filesystem::remove_all(root_); }

  std::string directory() const { return root_ + "/directory"; }
  std::string other() const { return root_ + "/other"; }
  std::string device() const { return root_ + "/device"; }
  std::string MakeFile(const std::string& name, uint64_t bytes) const {
    const std::string path = root_ + "/" + name;
    std::ofstream(path) << "";
    std::filesystem::resize_file(path, bytes);
    return path;
  }
  void WriteAt(uint64_t offset, const std::string& bytes) const {
    std::fstream file(device());
    file.seekp(static_cast<std::streamoff>(offset));
    file << bytes;
  }

  absl::Status Format(bool force = false) const {
    return FormatDevice(directory(), device(), force).status();
  }
  // Expects that the device is refused; returns the reason.
  std::string Refusal(const std::string& directory,
                      const std::string& path) const {
    const absl::Status status =
        OpenDeviceOf(directory, path, DeviceUse::kUse).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  }
  static std::string Refusal(const absl::Status& status) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  }

  std::string root_;
};

TEST_F(DeviceTest, FormattedForItsDirectory) {
  const auto formatted = FormatDevice(directory(), device(), false);
  ASSERT_TRUE(formatted.ok()) << formatted.status();
  EXPECT_EQ(formatted->device_bytes, kDeviceBytes);
  const auto owned = OpenDeviceOf(directory(), device(), DeviceUse::kOwn);
  ASSERT_TRUE(owned.ok()) << owned.status();
  EXPECT_EQ(owned->superblock, *formatted);
  struct stat info;
  ASSERT_EQ(::stat(device().c_str(), &info), 0);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, kDeviceBytes)
      << "a file is reserved";
}

TEST_F(DeviceTest, FormattingAgainChangesNothingUnlessForced) {
  const auto first = FormatDevice(directory(), device(), false);
  const auto second = FormatDevice(directory(), device(), false);
  ASSERT_TRUE(first.ok() && second.ok()) << second.status();
  EXPECT_EQ(*second, *first);
  const auto forced = FormatDevice(directory(), device(), true);
  ASSERT_TRUE(forced.ok()) << forced.status();
  EXPECT_NE(forced->device_id, first->device_id);
  EXPECT_EQ(forced->directory_id, first->directory_id);
}

TEST_F(DeviceTest, OtherContentIsKeptUnlessForced) {
  for (const uint64_t offset : {uint64_t{0}, uint64_t{1080}, kMiB - 1,
                                kDeviceBytes - kMiB, kDeviceBytes - 1}) {
    MakeFile("device", kDeviceBytes);
    WriteAt(offset, "x");
    EXPECT_THAT(Refusal(Format()), HasSubstr("is not empty")) << offset;
    EXPECT_THAT(Refusal(directory(), device()),
                HasSubstr("was never formatted for optstate"));
    EXPECT_EQ(Format(/*force=*/true), absl::OkStatus());
    std::filesystem::remove(directory() + "/device");
    std::filesystem::remove(device());
  }
}

TEST_F(DeviceTest, AnotherDirectorysDeviceIsRefusedEvenIfForced) {
  ASSERT_EQ(Format(), absl::OkStatus());
  EXPECT_THAT(Refusal(other(), device()),
              HasSubstr("belongs to another directory"));
  for (const bool force : {false, true}) {
    EXPECT_THAT(Refusal(FormatDevice(other(), device(), force).status()),
                HasSubstr("belongs to another directory"));
  }
  EXPECT_TRUE(OpenDeviceOf(directory(), device(), DeviceUse::kUse).ok());
}

TEST_F(DeviceTest, ADirectoryWithRecordsOnADeviceKeepsIt) {
  const auto superblock = FormatDevice(directory(), device(), false);
  ASSERT_TRUE(superblock.ok()) << superblock.status();
  const std::string folder = DiskFolder(directory(), "a");
  std::filesystem::create_directory(folder);
  ASSERT_TRUE(AllocateExtent(directory(), folder, *superblock, kMiB).ok());
  EXPECT_THAT(Refusal(Format(/*force=*/true)), HasSubstr("delete them first"));
  const std::string second = MakeFile("second", kDeviceBytes);
  EXPECT_THAT(Refusal(FormatDevice(directory(), second, false).status()),
              HasSubstr("delete them first"));
}

TEST_F(DeviceTest, AnotherDeviceOfTheDirectory) {
  ASSERT_EQ(Format(), absl::OkStatus());
  std::filesystem::copy_file(device(), root_ + "/former");
  ASSERT_EQ(Format(/*force=*/true), absl::OkStatus());
  EXPECT_THAT(Refusal(directory(), root_ + "/former"),
              HasSubstr("have two drives changed their names?"));
}

TEST_F(DeviceTest, NotThereNotADeviceOrTooSmall) {
  EXPECT_THAT(Refusal(directory(), root_ + "/none"), HasSubstr("is not there"));
  EXPECT_THAT(Refusal(directory(), root_), HasSubstr("not a block device"));
  EXPECT_THAT(Refusal(directory(), "/dev/null"),
              HasSubstr("not a block device"));
  const std::string small = MakeFile("small", 2 * kMiB - 1);
  EXPECT_THAT(Refusal(FormatDevice(directory(), small, false).status()),
              HasSubstr("a device needs 2097152 at least"));
}

TEST_F(DeviceTest, ADeviceThatHasShrunkOrWasDamagedIsDataLoss) {
  ASSERT_EQ(Format(), absl::OkStatus());
  std::filesystem::resize_file(device(), kDeviceBytes - 4096);
  const auto open = [this] {
    return OpenDeviceOf(directory(), device(), DeviceUse::kUse).status();
  };
  EXPECT_TRUE(absl::IsDataLoss(open())) << open();
  EXPECT_THAT(std::string(open().message()), HasSubstr("has shrunk"));
  std::filesystem::resize_file(device(), 2 * kDeviceBytes);
  EXPECT_EQ(open(), absl::OkStatus()) << "one that has grown";
  WriteAt(100, "x");
  EXPECT_TRUE(absl::IsDataLoss(open())) << open();
}

TEST_F(DeviceTest, OneOwnerAtATime) {
  ASSERT_EQ(Format(), absl::OkStatus());
  {
    const auto owner = OpenDeviceOf(directory(), device(), DeviceUse::kOwn);
    ASSERT_TRUE(owner.ok()) << owner.status();
    EXPECT_THAT(
        Refusal(OpenDeviceOf(directory(), device(), DeviceUse::kOwn).status()),
        HasSubstr("is in use"));
    EXPECT_THAT(Refusal(Format(/*force=*/true)), HasSubstr("is in use"));
    EXPECT_TRUE(OpenDeviceOf(directory(), device(), DeviceUse::kUse).ok());
  }
  EXPECT_EQ(Format(/*force=*/true), absl::OkStatus());
}

// A power cut after each of the two writes.
TEST_F(DeviceTest, FormattingThatWasNotFinishedIsRefusedAndCanBeRepeated) {
  ASSERT_TRUE(WriteDeviceNote(directory(), {.device_id = NewDeviceId(),
                                            .directory_id = NewDeviceId()})
                  .ok());
  EXPECT_THAT(Refusal(directory(), device()), HasSubstr("never formatted"));
  EXPECT_EQ(Format(), absl::OkStatus());
  EXPECT_TRUE(OpenDeviceOf(directory(), device(), DeviceUse::kUse).ok());
}

TEST_F(DeviceTest, ANoteThatIsNoneIsDataLoss) {
  ASSERT_EQ(Format(), absl::OkStatus());
  for (const char* text : {"", "device 0\ndirectory 1\n", "x"}) {
    std::ofstream(directory() + "/device") << text;
    const absl::Status status =
        OpenDeviceOf(directory(), device(), DeviceUse::kUse).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  }
}

class LoopDeviceTest : public DeviceTest {
 protected:
  // Makes the device; skips the test where that cannot be.
  void Make(const LoopDevice::Options& options) {
    auto made = LoopDevice::Make(device(), options);
    if (absl::IsFailedPrecondition(made.status())) {
      GTEST_SKIP() << made.status();
    }
    ASSERT_TRUE(made.ok()) << made.status();
    loop_.emplace(*std::move(made));
  }

  std::optional<LoopDevice> loop_;
};

TEST_F(LoopDeviceTest, ABlockDevice) {
  Make({.block_bytes = 4096});
  if (IsSkipped()) return;
  const std::string& path = loop_->path();
  ASSERT_EQ(FormatDevice(directory(), path, false).status(), absl::OkStatus());
  const auto owner = OpenDeviceOf(directory(), path, DeviceUse::kOwn);
  ASSERT_TRUE(owner.ok()) << owner.status();
  EXPECT_EQ(owner->superblock.device_bytes, kDeviceBytes);
  // As mount(2) and mkfs do it.
  EXPECT_LT(::open(path.c_str(), O_RDWR | O_EXCL), 0);
  EXPECT_EQ(errno, EBUSY);
  EXPECT_TRUE(OpenDeviceOf(directory(), path, DeviceUse::kUse).ok());
  EXPECT_THAT(Refusal(FormatDevice(directory(), path, /*force=*/true).status()),
              HasSubstr("is in use: it is mounted"));
}

TEST_F(LoopDeviceTest, ADeviceWithLargerBlocks) {
  Make({.block_bytes = 8192});
  if (IsSkipped()) return;
  EXPECT_THAT(Refusal(FormatDevice(directory(), loop_->path(), false).status()),
              HasSubstr("has logical blocks of 8192 bytes, more than 4096"));
}

TEST_F(LoopDeviceTest, AReadOnlyDevice) {
  ASSERT_EQ(Format(), absl::OkStatus());
  Make({.read_only = true});
  if (IsSkipped()) return;
  EXPECT_THAT(Refusal(directory(), loop_->path()), HasSubstr("is read-only"));
}

}  // namespace
}  // namespace optstate::storage
