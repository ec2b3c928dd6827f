#include "proto/types/memory_available.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace optstate {
namespace {

constexpr uint64_t kMiB = 1 << 20;

// A root with the files that a test writes to it; 1,000 MiB are available.
class MemoryAvailableTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "/root_" +
            testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(root_);
    Write("proc/meminfo",
          "MemTotal:        4096000 kB\n"
          "MemFree:          100000 kB\n"
          "MemAvailable:    1024000 kB\n");
  }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  uint64_t Available() {
    const auto bytes = AvailableMemoryBytesBelow(root_);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return bytes.value_or(0);
  }

  std::string root_;
};

TEST_F(MemoryAvailableTest, WithoutCgroupsItIsTheMachines) {
  EXPECT_EQ(Available(), 1000 * kMiB);
}

TEST_F(MemoryAvailableTest, V2LimitLeavesWhatIsNotUsed) {
  Write("proc/self/cgroup", "0::/a/b\n");
  Write("sys/fs/cgroup/a/b/memory.max", std::to_string(300 * kMiB) + "\n");
  Write("sys/fs/cgroup/a/b/memory.current", std::to_string(120 * kMiB) + "\n");
  EXPECT_EQ(Available(), 180 * kMiB);
  // Page cache is reclaimed before the limit is reached; shmem is not.
  Write("sys/fs/cgroup/a/b/memory.stat",
        "anon 10\nfile 1000\nshmem 77\ninactive_file " +
            std::to_string(20 * kMiB) + "\nactive_file " +
            std::to_string(5 * kMiB) + "\n");
  EXPECT_EQ(Available(), 205 * kMiB);
}

TEST_F(MemoryAvailableTest, V2LimitOfAParentCounts) {
  Write("proc/self/cgroup", "0::/a/b\n");
  Write("sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("sys/fs/cgroup/a/b/memory.current", "0\n");
  Write("sys/fs/cgroup/a/memory.max", std::to_string(50 * kMiB) + "\n");
  Write("sys/fs/cgroup/a/memory.current", std::to_string(10 * kMiB) + "\n");
  EXPECT_EQ(Available(), 40 * kMiB);
}

TEST_F(MemoryAvailableTest, V2ContainerThatSeesItsOwnPartAlone) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", std::to_string(50 * kMiB) + "\n");
  Write("sys/fs/cgroup/memory.current", std::to_string(60 * kMiB) + "\n");
  EXPECT_EQ(Available(), 0u);
}

TEST_F(MemoryAvailableTest, V1CountsTheWholeHierarchy) {
  Write("proc/self/cgroup",
        "5:cpu,cpuacct:/x\n4:memory:/docker/1\n1:name=systemd:/\n0::/\n");
  Write("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes",
        std::to_string(80 * kMiB) + "\n");
  Write("sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes",
        std::to_string(30 * kMiB) + "\n");
  Write("sys/fs/cgroup/memory/docker/1/memory.stat",
        "inactive_file 1\ntotal_inactive_file " + std::to_string(4 * kMiB) +
            "\ntotal_active_file " + std::to_string(1 * kMiB) + "\n");
  EXPECT_EQ(Available(), 55 * kMiB);
}

TEST_F(MemoryAvailableTest, V1WithoutALimitIsTheMachines) {
  Write("proc/self/cgroup", "4:memory:/\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "12345\n");
  EXPECT_EQ(Available(), 1000 * kMiB);
}

TEST_F(MemoryAvailableTest, MissingMeminfoIsAnError) {
  std::filesystem::remove_all(root_);
  EXPECT_EQ(AvailableMemoryBytesBelow(root_).status().code(),
            absl::StatusCode::kNotFound);
  Write("proc/meminfo", "MemTotal: 5 kB\n");
  EXPECT_EQ(AvailableMemoryBytesBelow(root_).status().code(),
            absl::StatusCode::kInternal);
}

TEST_F(MemoryAvailableTest, ThisMachineHasSome) {
  const auto bytes = AvailableMemoryBytes();
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_GT(*bytes, 0u);
}

}  // namespace
}  // namespace optstate
