#include "server/config/nvme_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace optstate::config {
namespace {

TEST(NvmeDirectoryTest, ADirectoryAndItsDevice) {
  const auto plain = ParseNvmeDirectory("/d");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->path(), "/d");
  EXPECT_EQ(plain->device(), "");
  const auto both = ParseNvmeDirectory("/d,device=/dev/nvme1n1");
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_EQ(both->path(), "/d");
  EXPECT_EQ(both->device(), "/dev/nvme1n1");
  for (const char* text : {"", ",device=/x", "/d,", "/d,device=", "/d,/x",
                           "/d,devices=/x", "/d,device=/x,device=/y"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseNvmeDirectory(text).status()))
        << text;
  }
}

TEST(NvmeDirectoryTest, TheDeviceOfADirectory) {
  v1::NvmeSettings nvme;
  nvme.add_directories("/a");
  nvme.add_directories("/b");
  *nvme.add_directory_settings() = *ParseNvmeDirectory("/b,device=/dev/b");
  EXPECT_EQ(DeviceOf(nvme, "/a"), "");
  EXPECT_EQ(DeviceOf(nvme, "/b"), "/dev/b");
  EXPECT_THAT(DirectoryTexts(nvme),
              ::testing::ElementsAre("/a", "/b,device=/dev/b"));
}

}  // namespace
}  // namespace optstate::config
