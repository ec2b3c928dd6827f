#include "server/scheduler/workers/numa_memory.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "gtest/gtest.h"
#include "server/scheduler/workers/cpu_topology.h"

namespace optstate::scheduler {
namespace {

int PolicyOf(const std::byte* address) {
  int policy = -1;
  if (::syscall(SYS_get_mempolicy, &policy, nullptr, 0, address, MPOL_F_ADDR) !=
      0) {
    return -1;
  }
  return policy;
}

TEST(NumaMemoryTest, SharesOfANodeAreThoseOfItsParticipants) {
  WorkerPlacement placement;
  for (const int node : {0, 0, 0, 2}) placement.seats.push_back({node, {}});
  const std::vector<NodeShare> shares = NodeShares(placement, 10);
  ASSERT_EQ(shares.size(), 2u);
  EXPECT_EQ(shares[0].node, 0);
  EXPECT_EQ(shares[0].begin, 0u);
  EXPECT_EQ(shares[0].end, 7u);
  EXPECT_EQ(shares[1].node, 2);
  EXPECT_EQ(shares[1].begin, 7u);
  EXPECT_EQ(shares[1].end, 10u);
  EXPECT_TRUE(NodeShares({}, 10).empty());
}

TEST(NumaMemoryTest, PagesAreAskedOfTheNodeAndKeepTheirContent) {
  constexpr size_t kHuge = size_t{2} << 20;
  const int fd = ::memfd_create("numa", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(fd, 4 * kHuge), 0);
  void* const map =
      ::mmap(nullptr, 4 * kHuge, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(map, MAP_FAILED);
  auto* const data = static_cast<std::byte*>(map);
  std::memset(data, 7, 4 * kHuge);
  if (PolicyOf(data) < 0) GTEST_SKIP() << "a kernel without NUMA";
  EXPECT_EQ(PolicyOf(data), MPOL_DEFAULT);
  const absl::Status moved = MoveToNode({data, 2 * kHuge}, 0);
  ASSERT_TRUE(moved.ok()) << moved;
  EXPECT_EQ(PolicyOf(data + kHuge), MPOL_PREFERRED);
  EXPECT_EQ(PolicyOf(data + 3 * kHuge), MPOL_DEFAULT);
  for (size_t i = 0; i < 4 * kHuge; i += 4096) {
    ASSERT_EQ(data[i], std::byte{7});
  }
  ::munmap(map, 4 * kHuge);
  ::close(fd);
}

int NodeOf(const std::byte* address) {
  int node = -1;
  if (::syscall(SYS_get_mempolicy, &node, nullptr, 0, address,
                MPOL_F_NODE | MPOL_F_ADDR) != 0) {
    return -1;
  }
  return node;
}

// The file's pages are already allocated on some node.
TEST(NumaMemoryTest, PagesMoveFromNodeToNode) {
  if (NodesBelow("", AllowedCpus()).size() < 2) {
    GTEST_SKIP() << "one NUMA node; deploy/test-numa has two";
  }
  constexpr size_t kHuge = size_t{2} << 20;
  constexpr size_t kHalf = kHuge / 2;
  const int fd = ::memfd_create("numa", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(fd, 4 * kHuge), 0);
  ASSERT_EQ(::posix_fallocate(fd, 0, 4 * kHuge), 0);
  void* const map =
      ::mmap(nullptr, 4 * kHuge, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(map, MAP_FAILED);
  auto* const data = static_cast<std::byte*>(map);
  data[3 * kHuge] = std::byte{9};
  for (const auto& [low, high] : {std::pair{0, 1}, std::pair{1, 0}}) {
    ASSERT_TRUE(MoveToNode({data, 2 * kHuge}, low).ok());
    ASSERT_TRUE(MoveToNode({data + 2 * kHuge, 2 * kHuge}, high).ok());
    // The ends of the halves are rounded by up to half a huge page.
    for (size_t i = kHalf; i + kHalf < 2 * kHuge; i += 4096) {
      ASSERT_EQ(NodeOf(data + i), low) << i;
      ASSERT_EQ(NodeOf(data + 2 * kHuge + i), high) << i;
    }
  }
  EXPECT_EQ(data[3 * kHuge], std::byte{9});
  ::munmap(map, 4 * kHuge);
  ::close(fd);
}

TEST(NumaMemoryTest, ANodeThatIsNotThereIsAnError) {
  constexpr size_t kBytes = size_t{8} << 20;
  void* const map = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(map, MAP_FAILED);
  EXPECT_FALSE(MoveToNode({static_cast<std::byte*>(map), kBytes}, 900).ok());
  EXPECT_FALSE(MoveToNode({static_cast<std::byte*>(map), kBytes}, 5000).ok());
  EXPECT_TRUE(MoveToNode({static_cast<std::byte*>(map), 100}, 900).ok());
  ::munmap(map, kBytes);
}

}  // namespace
}  // namespace optstate::scheduler
