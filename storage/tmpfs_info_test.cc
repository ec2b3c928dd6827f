#include "storage/tmpfs_info.h"

#include <stdlib.h>
#include <sys/mount.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

using ::testing::HasSubstr;

TmpfsInfo Tmpfs(const std::string& huge_option,
                const std::string& shmem_enabled) {
  TmpfsInfo info;
  info.is_tmpfs = true;
  info.mount_point = "/mnt";
  info.huge_option = huge_option;
  info.shmem_enabled = shmem_enabled;
  return info;
}

TEST(TmpfsInfoTest, MountOptionAndMachineSettingDecide) {
  for (const char* option : {"always", "within_size", "advise"}) {
    EXPECT_TRUE(Tmpfs(option, "never").huge_pages());
    EXPECT_FALSE(Tmpfs(option, "deny").huge_pages());
  }
  for (const char* option : {"", "never"}) {
    EXPECT_FALSE(Tmpfs(option, "never").huge_pages());
    EXPECT_FALSE(Tmpfs(option, "always").huge_pages());
    EXPECT_TRUE(Tmpfs(option, "force").huge_pages());
  }
}

TEST(TmpfsInfoTest, TextsSayWhyAndWhatHelps) {
  EXPECT_THAT(DescribePages(Tmpfs("within_size", "never")),
              HasSubstr("huge=within_size"));
  EXPECT_THAT(DescribePages(Tmpfs("", "never")),
              HasSubstr("the tmpfs on /mnt has no huge= option; huge_pages: "
                        "mount"));
  EXPECT_THAT(DescribePages(Tmpfs("always", "deny")), HasSubstr("is deny"));
  TmpfsInfo disk;
  disk.file_system = "ext4";
  EXPECT_THAT(DescribePages(disk), HasSubstr("page cache of ext4"));
}

TEST(TmpfsInfoTest, InspectsADirectory) {
  EXPECT_EQ(InspectDirectory("/nonexistent").status().code(),
            absl::StatusCode::kNotFound);
  const auto info = InspectDirectory(::testing::TempDir());
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_GE(info->bytes_total, info->bytes_left);
  EXPECT_FALSE(info->file_system.empty());
  EXPECT_FALSE(DescribePages(*info).empty());
}

TEST(TmpfsInfoTest, MountsUnlessSomethingWouldBeHidden) {
  std::string directory = ::testing::TempDir() + "/mount-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  std::ofstream(directory + "/job") << "x";
  EXPECT_EQ(MountHugeTmpfs(directory).code(),
            absl::StatusCode::kFailedPrecondition);
  std::filesystem::remove(directory + "/job");
  const absl::Status mounted = MountHugeTmpfs(directory);
  if (!mounted.ok()) {
    std::filesystem::remove_all(directory);
    GTEST_SKIP() << "needs CAP_SYS_ADMIN and a kernel with huge pages: "
                 << mounted;
  }
  const auto info = InspectDirectory(directory);
  std::ofstream(directory + "/job") << "x";
  const absl::Status again = MountHugeTmpfs(directory);
  ASSERT_EQ(::umount(directory.c_str()), 0);
  std::filesystem::remove_all(directory);
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->huge_option, "within_size");
  EXPECT_TRUE(again.ok());
}

}  // namespace
}  // namespace optstate::storage
