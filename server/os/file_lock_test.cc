#include "server/os/file_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <optional>

#include "absl/strings/str_cat.h"

namespace optstate::os {
namespace {

using ::testing::HasSubstr;

TEST(FileLockTest, SecondHolderIsRefusedAndToldWho) {
  const std::string path = testing::TempDir() + "/second.lock";
  const auto first = FileLock::Take(path, "state directory /s");
  ASSERT_TRUE(first.ok()) << first.status();
  // flock belongs to the open file, so one process suffices for the test.
  const absl::Status second =
      FileLock::Take(path, "state directory /s").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(second));
  EXPECT_THAT(std::string(second.message()),
              HasSubstr(absl::StrCat("state directory /s is in use by process ",
                                     ::getpid())));
}

TEST(FileLockTest, CanBeTakenAfterwards) {
  const std::string path = testing::TempDir() + "/afterwards.lock";
  std::optional<FileLock> first = *FileLock::Take(path, "x");
  first.reset();
  EXPECT_TRUE(FileLock::Take(path, "x").ok());
}

TEST(FileLockTest, UnusablePaths) {
  EXPECT_TRUE(absl::IsNotFound(FileLock::Take("/no/such/lock", "x").status()));
  const std::string link = testing::TempDir() + "/link.lock";
  ASSERT_EQ(::symlink("/etc/passwd", link.c_str()), 0);
  EXPECT_FALSE(FileLock::Take(link, "x").ok());
}

}  // namespace
}  // namespace optstate::os
