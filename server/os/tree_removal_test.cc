#include "server/os/tree_removal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <string>

#include "absl/status/status.h"

namespace optstate::os {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kPiece = 65536;

class TreeRemovalTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(root_.data()), nullptr);
    for (const char* name : {"/a", "/a/inner", "/b"}) {
      ASSERT_TRUE(fs::create_directory(root_ + name));
    }
  }
  void TearDown() override { fs::remove_all(root_); }

  void Write(const std::string& name, size_t bytes) const {
    const int fd = ::open((root_ + name).c_str(), O_WRONLY | O_CREAT, 0600);
    ASSERT_GE(fd, 0);
    const std::string text(bytes, 'x');
    EXPECT_EQ(::write(fd, text.data(), bytes), static_cast<ssize_t>(bytes));
    EXPECT_EQ(::fsync(fd), 0);  // some file systems allocate later
    ::close(fd);
  }

  std::string root_ = testing::TempDir() + "/tree_removal-XXXXXX";
};

TEST_F(TreeRemovalTest, AllTreesGoAndTheirBytesAreCounted) {
  Write("/a/large", 3 * kPiece + 1);
  Write("/a/inner/small", 10);
  Write("/b/mapped", 2 * kPiece);
  ASSERT_TRUE(fs::exists(root_ + "/a/large"));
  RemovalProgress progress;
  const absl::Status removed =
      RemoveTrees({{root_ + "/a"}, {root_ + "/b", /*may_be_mapped=*/true}},
                  &progress, kPiece);
  EXPECT_TRUE(removed.ok()) << removed;
  EXPECT_FALSE(fs::exists(root_ + "/a"));
  EXPECT_FALSE(fs::exists(root_ + "/b"));
  EXPECT_EQ(progress.bytes.load(), progress.bytes_total.load());
  EXPECT_GT(progress.bytes_total.load(), 0u);
}

// A rank reads on what it has mapped, after its job was deleted.
TEST_F(TreeRemovalTest, AFileThatIsMappedIsNotCut) {
  Write("/b/mapped", 4 * kPiece);
  const int fd = ::open((root_ + "/b/mapped").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  void* const mapped =
      ::mmap(nullptr, 4 * kPiece, PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  ASSERT_NE(mapped, MAP_FAILED);
  RemovalProgress progress;
  EXPECT_TRUE(
      RemoveTrees({{root_ + "/b", /*may_be_mapped=*/true}}, &progress, kPiece)
          .ok());
  EXPECT_FALSE(fs::exists(root_ + "/b"));
  EXPECT_EQ(static_cast<const char*>(mapped)[4 * kPiece - 1], 'x');
  ::munmap(mapped, 4 * kPiece);
}

// The other name's file stays as it is, and what a link leads to does too.
TEST_F(TreeRemovalTest, WhatHasAnotherNameStaysWhole) {
  Write("/b/file", 3 * kPiece);
  fs::create_hard_link(root_ + "/b/file", root_ + "/a/file");
  fs::create_symlink(root_ + "/b", root_ + "/a/link");
  RemovalProgress progress;
  EXPECT_TRUE(RemoveTrees({{root_ + "/a"}}, &progress, kPiece).ok());
  EXPECT_FALSE(fs::exists(root_ + "/a"));
  EXPECT_EQ(fs::file_size(root_ + "/b/file"), 3 * kPiece);
}

TEST_F(TreeRemovalTest, ATreeThatIsNotThereIsNoError) {
  Write("/b/file", 10);
  RemovalProgress progress;
  EXPECT_TRUE(
      RemoveTrees({{root_ + "/absent"}, {root_ + "/b"}}, &progress).ok());
  EXPECT_FALSE(fs::exists(root_ + "/b"));
}

}  // namespace
}  // namespace optstate::os
