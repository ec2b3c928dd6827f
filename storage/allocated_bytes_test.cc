#include "storage/allocated_bytes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "proto/types/unique_fd.h"

namespace optstate::storage {
namespace {

namespace fs = std::filesystem;

constexpr size_t kFileBytes = 64 << 10;
constexpr int kCount = 8;

class AllocatedBytesTest : public testing::Test {
 protected:
  AllocatedBytesTest() { EXPECT_NE(::mkdtemp(root_.data()), nullptr); }
  ~AllocatedBytesTest() override { fs::remove_all(root_); }

  void Give(const std::string& file) const {
    fs::create_directories(fs::path(root_ + file).parent_path());
    std::ofstream(root_ + file) << std::string(kFileBytes, 'x');
  }

  std::string root_ = ::testing::TempDir() + "/allocated_bytes-XXXXXX";
};

TEST_F(AllocatedBytesTest, FilesOfAllFoldersCount) {
  EXPECT_EQ(AllocatedBytesBelow(root_), 0u);
  Give("/a");
  Give("/b/c");
  Give("/b/d/e");
  EXPECT_GE(AllocatedBytesBelow(root_), 3 * kFileBytes);
  EXPECT_GE(AllocatedBytesBelow(root_ + "/b"), 2 * kFileBytes);
  EXPECT_LT(AllocatedBytesBelow(root_ + "/b"), 3 * kFileBytes);
}

TEST_F(AllocatedBytesTest, AFolderThatIsNotThereHasNone) {
  EXPECT_EQ(AllocatedBytesBelow(root_ + "/absent"), 0u);
}

TEST_F(AllocatedBytesTest, LinksAreNotFollowed) {
  Give("/b/c");
  fs::create_directory(root_ + "/links");
  fs::create_symlink(root_ + "/b", root_ + "/links/b");
  fs::create_symlink(root_ + "/b/c", root_ + "/links/c");
  EXPECT_EQ(AllocatedBytesBelow(root_ + "/links"), 0u);
}

// One that is gone when its turn comes cannot be opened, as here one for which
// no file descriptor is left.
TEST_F(AllocatedBytesTest, AFolderThatCannotBeOpenedHidesNothingElse) {
  for (int i = 0; i < kCount; ++i) Give("/file" + std::to_string(i));
  const uint64_t of_files = AllocatedBytesBelow(root_);
  ASSERT_GE(of_files, kCount * kFileBytes);
  for (int i = 0; i < kCount; ++i) {
    Give("/folder" + std::to_string(i) + "/file");
  }
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  UniqueFd next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(next.ok());
  // The lowest number that is free is the only one that may be used.
  const rlimit tight = {static_cast<rlim_t>(next.get() + 1), limit.rlim_max};
  next.reset();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  const uint64_t counted = AllocatedBytesBelow(root_);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(counted, of_files);
}

}  // namespace
}  // namespace optstate::storage
