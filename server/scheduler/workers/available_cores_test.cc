#include "server/scheduler/workers/available_cores.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace optstate::scheduler {
namespace {

class AvailableCoresTest : public ::testing::Test {
 protected:
  ~AvailableCoresTest() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const std::string root_ =
      ::testing::TempDir() + "/cores." + std::to_string(::getpid());
};

TEST_F(AvailableCoresTest, AtLeastOne) { EXPECT_GE(AvailableCores(), 1); }

TEST_F(AvailableCoresTest, WithoutCgroupsTheLimitStands) {
  EXPECT_EQ(CgroupCoresBelow(root_, 8), 8);
}

TEST_F(AvailableCoresTest, TheTightestUnifiedGroupCounts) {
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(CgroupCoresBelow(root_, 8), 8);
  Write("/sys/fs/cgroup/a/cpu.max", "250000 100000\n");
  EXPECT_EQ(CgroupCoresBelow(root_, 8), 3);
  Write("/sys/fs/cgroup/a/b/cpu.max", "50000 100000\n");
  EXPECT_EQ(CgroupCoresBelow(root_, 8), 1);
  EXPECT_EQ(CgroupCoresBelow(root_, 1), 1);
}

TEST_F(AvailableCoresTest, GroupsOfTheFirstVersion) {
  Write("/proc/self/cgroup", "5:cpuacct,cpu:/job\n4:memory:/other\n");
  Write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  Write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(CgroupCoresBelow(root_, 8), 8);
  Write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "400000\n");
  EXPECT_EQ(CgroupCoresBelow(root_, 8), 4);
}

TEST_F(AvailableCoresTest, GarbageIsNoQuota) {
  Write("/proc/self/cgroup", "garbage\n0::/\n");
  for (const char* text : {"", "x y", "0 0", "-5 100000", "100000"}) {
    Write("/sys/fs/cgroup/cpu.max", text);
    EXPECT_EQ(CgroupCoresBelow(root_, 8), 8) << text;
  }
}

}  // namespace
}  // namespace optstate::scheduler
