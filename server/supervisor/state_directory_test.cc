#include "server/supervisor/state_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(DescribeStatePagesTest, NeverSaysWhatTheMountReallyDoes) {
  storage::TmpfsInfo info;
  info.is_tmpfs = true;
  info.file_system = "tmpfs";
  info.mount_point = "/dev/shm";
  info.shmem_enabled = "never";
  EXPECT_EQ(DescribeStatePages(v1::HUGE_PAGES_NEVER, info),
            "4 KiB pages, because the configuration says huge_pages: never");
  for (const char* option : {"always", "within_size"}) {
    info.huge_option = option;
    EXPECT_THAT(DescribeStatePages(v1::HUGE_PAGES_NEVER, info),
                AllOf(StartsWith("huge pages where they can be had"),
                      HasSubstr(option), HasSubstr("cannot overrule")));
    EXPECT_THAT(DescribeStatePages(v1::HUGE_PAGES_AUTO, info),
                Not(HasSubstr("overrule")));
  }
  info.shmem_enabled = "deny";
  EXPECT_THAT(DescribeStatePages(v1::HUGE_PAGES_NEVER, info),
              StartsWith("4 KiB pages"));
  info.is_tmpfs = false;
  info.file_system = "ext4";
  EXPECT_THAT(DescribeStatePages(v1::HUGE_PAGES_NEVER, info),
              HasSubstr("page cache of ext4"));
}

}  // namespace
}  // namespace optstate::supervisor
