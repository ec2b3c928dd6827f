#include "server/scheduler/workers/cpu_topology.h"

#include <gmock/gmock.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "gtest/gtest.h"

namespace optstate::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(CpuListTest, RangesAndNumbers) {
  EXPECT_THAT(ParseCpuList("0-2,5,8-9"), ElementsAre(0, 1, 2, 5, 8, 9));
  EXPECT_THAT(ParseCpuList("3\n"), ElementsAre(3));
  for (const char* text : {"", "x", "-", "1-x", "5-3"}) {
    EXPECT_THAT(ParseCpuList(text), IsEmpty()) << text;
  }
}

TEST(AllowedCpusTest, AreThoseOfTheMask) {
  const std::vector<int> all = AllowedCpus();
  ASSERT_FALSE(all.empty());
  std::vector<int> narrow;
  std::thread([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(all.back()), &set);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(set), &set), 0);
    narrow = AllowedCpus();
  }).join();
  EXPECT_THAT(narrow, ElementsAre(all.back()));
}

class NodesTest : public ::testing::Test {
 protected:
  ~NodesTest() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + "/sys/devices/system/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }

  const std::string root_ =
      ::testing::TempDir() + "/nodes." + std::to_string(::getpid());
};

TEST_F(NodesTest, OnlyOurPartOfEach) {
  Write("node/online", "0-1,3");
  Write("node/node0/cpulist", "0-3,8-11");
  Write("node/node1/cpulist", "4-7,12-15");
  Write("node/node3/cpulist", "");  // memory only
  const std::vector<CpuNode> nodes = NodesBelow(root_, {2, 3, 4, 8, 15});
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(nodes[0].node, 0);
  EXPECT_THAT(nodes[0].cpus, ElementsAre(2, 3, 8));
  EXPECT_EQ(nodes[1].node, 1);
  EXPECT_THAT(nodes[1].cpus, ElementsAre(4, 15));
  EXPECT_EQ(NodesBelow(root_, {5, 6}).front().node, 1);
}

TEST_F(NodesTest, OneNodeWhereNothingIsTold) {
  for (const char* cpulist : {"", "0"}) {
    if (*cpulist != 0) {
      Write("node/online", "0");
      Write("node/node0/cpulist", cpulist);
    }
    const std::vector<CpuNode> nodes = NodesBelow(root_, {0, 7});
    ASSERT_EQ(nodes.size(), 1u);
    EXPECT_EQ(nodes[0].node, 0);
    EXPECT_THAT(nodes[0].cpus, ElementsAre(0, 7));
  }
}

TEST_F(NodesTest, OnlineCpus) {
  EXPECT_EQ(OnlineCpusBelow(root_), 0);
  Write("cpu/online", "0-15");
  EXPECT_EQ(OnlineCpusBelow(root_), 16);
  EXPECT_GE(OnlineCpusBelow(""), 1);
}

}  // namespace
}  // namespace optstate::scheduler
