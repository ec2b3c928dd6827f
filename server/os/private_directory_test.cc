#include "server/os/private_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace optstate::os {
namespace {

using ::testing::HasSubstr;

class PrivateDirectoryTest : public testing::Test {
 protected:
  PrivateDirectoryTest() {
    std::string name = testing::TempDir() + "/private-XXXXXX";
    root_ = ::mkdtemp(name.data());
  }
  ~PrivateDirectoryTest() override { EXPECT_TRUE(RemoveTree(root_).ok()); }

  std::string root_;
};

mode_t ModeOf(const std::string& path) {
  struct stat info;
  EXPECT_EQ(::stat(path.c_str(), &info), 0);
  return info.st_mode & 07777;
}

TEST_F(PrivateDirectoryTest, CreatesItAndItsParents) {
  const std::string path = root_ + "/a/b/c";
  ASSERT_TRUE(EnsurePrivateDirectory(path, 0700).ok());
  EXPECT_EQ(ModeOf(path), 0700u);
  EXPECT_TRUE(EnsurePrivateDirectory(path, 0700).ok());
}

TEST_F(PrivateDirectoryTest, RefusesWhatOthersCanWrite) {
  const std::string path = root_ + "/shared";
  ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(path.c_str(), 01777), 0);
  const absl::Status status = EnsurePrivateDirectory(path, 0700);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("mode 1777"));
}

TEST_F(PrivateDirectoryTest, RefusesFilesAndLinks) {
  const std::string file = root_ + "/file";
  std::ofstream(file) << "x";
  EXPECT_TRUE(absl::IsFailedPrecondition(EnsurePrivateDirectory(file, 0700)));
  const std::string link = root_ + "/link";
  ASSERT_EQ(::symlink("/tmp", link.c_str()), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(EnsurePrivateDirectory(link, 0700)));
}

TEST_F(PrivateDirectoryTest, RefusesAnotherUsersDirectory) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to give a directory away";
  const std::string path = root_ + "/theirs";
  ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
  ASSERT_EQ(::chown(path.c_str(), 4711, 4711), 0);
  const absl::Status status = EnsurePrivateDirectory(path, 0700);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("uid 4711"));
}

TEST_F(PrivateDirectoryTest, RemoveTreeFollowsNoLink) {
  const std::string kept = root_ + "/kept";
  std::ofstream(kept) << "x";
  const std::string tree = root_ + "/tree";
  ASSERT_TRUE(EnsurePrivateDirectory(tree + "/sub", 0700).ok());
  ASSERT_EQ(::symlink(root_.c_str(), (tree + "/sub/link").c_str()), 0);
  EXPECT_TRUE(RemoveTree(tree).ok());
  EXPECT_EQ(::access(tree.c_str(), F_OK), -1);
  EXPECT_EQ(::access(kept.c_str(), F_OK), 0);
  EXPECT_TRUE(RemoveTree(tree).ok());
}

}  // namespace
}  // namespace optstate::os
