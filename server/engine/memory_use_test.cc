#include "server/engine/memory_use.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <sstream>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(MemoryUseTest, EveryMappingOfAFileCounts) {
  std::istringstream smaps(
      "7f0000000000-7f0040000000 rw-s 00000000 00:1a 77   /dev/shm/with space\n"
      "Size:            1048576 kB\n"
      "KernelPageSize:        4 kB\n"
      "MMUPageSize:           4 kB\n"
      "Rss:               10240 kB\n"
      "ShmemPmdMapped:     8192 kB\n"
      "VmFlags: rd wr sh mr mw me ms sd\n"
      "7f0040000000-7f0080000000 rw-s 40000000 00:1a 77   /dev/shm/with space\n"
      "KernelPageSize:        4 kB\n"
      "Rss:                   8 kB\n"
      "7f1000000000-7f1000001000 rw-p 00000000 00:00 0\n"
      "KernelPageSize:        4 kB\n"
      "Rss:                 400 kB\n"
      "7f2000000000-7f2000400000 rw-s 00000000 00:2b 5   /huge/x\n"
      "KernelPageSize:     2048 kB\n"
      "Rss:                   0 kB\n"
      "Shared_Hugetlb:        0 kB\n"
      "Private_Hugetlb:    4096 kB\n"
      "garbage\n");
  std::istringstream numa_maps(
      "7f0000000000 default file=/dev/shm/with\\040space dirty=2560 N0=2000 "
      "N1=560 kernelpagesize_kB=4\n"
      "7f0040000000 prefer:1 file=/dev/shm/with\\040space N1=2 "
      "kernelpagesize_kB=4\n"
      "7f1000000000 default anon=100 N0=100 kernelpagesize_kB=4\n"
      "7f2000000000 default file=/huge/x huge N3=2 kernelpagesize_kB=2048\n"
      "\n");
  const auto uses = ParseMemoryUse(smaps, numa_maps, 2 << 20);
  ASSERT_EQ(uses.size(), 2u);
  const MemoryUse& shared = uses.at("00:1a 77");
  EXPECT_THAT(shared.pages, ElementsAre(Pair(4096, (2048 + 8) << 10),
                                        Pair(2 << 20, 8 << 20)));
  EXPECT_THAT(shared.nodes,
              ElementsAre(Pair(0, 2000 * 4096), Pair(1, 562 * 4096)));
  const MemoryUse& huge = uses.at("00:2b 5");
  EXPECT_THAT(huge.pages, ElementsAre(Pair(2 << 20, 4 << 20)));
  EXPECT_THAT(huge.nodes, ElementsAre(Pair(3, 4 << 20)));
}

TEST(MemoryUseTest, OfFilesThatThisProcessMaps) {
  const std::string job_dir =
      "/dev/shm/memory-use." + std::to_string(::getpid());
  std::filesystem::create_directories(job_dir + "/state");
  v1::Job job;
  for (const char* name : {"step", "undo", "master"}) {
    v1::ArrayBytes* const array = job.add_arrays();
    array->set_name(name);
    array->set_file(std::string(name) == "step" ? "step_counts.i64" : name);
  }
  constexpr size_t kBytes = 64 << 10;
  const std::pair<const char*, size_t> touched[] = {{"step_counts.i64", kBytes},
                                                    {"undo", kBytes / 2}};
  for (const auto& [file, bytes] : touched) {
    const int fd =
        ::open((job_dir + "/state/" + file).c_str(), O_RDWR | O_CREAT, 0600);
    ASSERT_EQ(::ftruncate(fd, kBytes), 0);
    void* const map =
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ASSERT_NE(map, MAP_FAILED);
    std::memset(map, 1, bytes);
    ::close(fd);
  }
  AddMemoryUse(job_dir, &job);
  std::filesystem::remove_all(job_dir);
  for (int i = 0; i < 2; ++i) {
    const v1::ArrayBytes& array = job.arrays(i);
    ASSERT_EQ(array.pages_size(), 1) << array.name();
    EXPECT_EQ(array.pages(0).bytes(), touched[i].second);
    EXPECT_EQ(array.pages(0).page_bytes(), 4096u);
    if (::access("/proc/self/numa_maps", R_OK) != 0) continue;
    uint64_t on_nodes = 0;
    for (const v1::NodeBytes& node : array.nodes()) on_nodes += node.bytes();
    EXPECT_EQ(on_nodes, touched[i].second) << array.name();
  }
  EXPECT_THAT(job.arrays(2).pages(), IsEmpty());  // there is no file
}

}  // namespace
}  // namespace optstate::engine
