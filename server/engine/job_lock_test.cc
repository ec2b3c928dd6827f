#include "server/engine/job_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace optstate::engine {
namespace {

using ::testing::HasSubstr;

TEST(JobLockTest, RefusalNamesTheEngineThatHasIt) {
  std::string directory = testing::TempDir() + "/job-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  // The file holds the pid of a process that has ended.
  std::ofstream(directory + "/lock") << "4194303999\n";
  const auto first = LockJob(directory, absl::ZeroDuration());
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = LockJob(directory, absl::ZeroDuration()).status();
  EXPECT_TRUE(absl::IsUnavailable(second)) << second;
  EXPECT_THAT(std::string(second.message()),
              HasSubstr(absl::StrCat("process ", ::getpid(), ",")));
}

// The holder is of an older build, or found no room for its pid.
TEST(JobLockTest, HolderThatDidNotSayWhoItIs) {
  std::string directory = testing::TempDir() + "/job-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  auto first = LockJob(directory, absl::ZeroDuration());
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_EQ(::ftruncate(first->get(), 0), 0);
  const absl::Status second = LockJob(directory, absl::ZeroDuration()).status();
  EXPECT_THAT(std::string(second.message()),
              HasSubstr("another engine of this job is still running"));
  first->reset();
  EXPECT_TRUE(LockJob(directory, absl::ZeroDuration()).ok());
}

}  // namespace
}  // namespace optstate::engine
