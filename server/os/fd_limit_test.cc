#include "server/os/fd_limit.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace optstate::os {
namespace {

TEST(FdLimitTest, TheLimitIsRaisedAsFarAsItMayBe) {
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_GT(limit.rlim_max, 64u);
  limit.rlim_cur = 64;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(FdLimit(), 64u);
  RaiseFdLimit();
  EXPECT_EQ(FdLimit(), limit.rlim_max);
}

}  // namespace
}  // namespace optstate::os
