#include "proto/shm/spread_mapping.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/unique_fd.h"

namespace optstate::shm {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kPeriod = 256 * kMiB;

// Makes a file without pages: the tests only check addresses.
UniqueFd FileOf(uint64_t bytes) {
  UniqueFd fd(memfd_create("spread", MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  return fd;
}

uint64_t PlaceOf(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kPeriod;
}

uint64_t AddressBytes() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

class SpreadMappingTest : public testing::Test {
 protected:
  static void* Map(uint64_t bytes = kPeriod) {
    void* const data = MapSpread(FileOf(bytes).get(), bytes, PROT_READ);
    EXPECT_NE(data, MAP_FAILED) << errno;
    return data;
  }
  static std::vector<void*> MapMany(size_t count, uint64_t bytes = kPeriod) {
    std::vector<void*> all(count);
    for (void*& data : all) data = Map(bytes);
    return all;
  }
};

TEST_F(SpreadMappingTest, MappingsOfAPeriodBeginInDifferentSlots) {
  const std::vector<void*> all = MapMany(128);
  std::set<uint64_t> places;
  for (void* data : all) {
    EXPECT_EQ(PlaceOf(data) % (2 * kMiB), 0);
    places.insert(PlaceOf(data));
  }
  EXPECT_EQ(places.size(), 128);
  for (void* data : all) UnmapSpread(data, kPeriod);
}

TEST_F(SpreadMappingTest, ASlotIsFreeAgainOnceItsMappingIsGone) {
  std::vector<void*> all = MapMany(128);
  const uint64_t place = PlaceOf(all[77]);
  UnmapSpread(all[77], kPeriod);
  all[77] = Map();
  EXPECT_EQ(PlaceOf(all[77]), place);
  for (void* data : all) UnmapSpread(data, kPeriod);
}

TEST_F(SpreadMappingTest, OneMoreThanThereAreSlotsSharesOne) {
  const std::vector<void*> all = MapMany(256, 2 * kMiB);
  std::multiset<uint64_t> places;
  for (void* data : all) places.insert(PlaceOf(data));
  for (const uint64_t place : places) EXPECT_EQ(places.count(place), 2);
  for (void* data : all) UnmapSpread(data, 2 * kMiB);
}

TEST_F(SpreadMappingTest, NothingButTheFileStaysMapped) {
  const uint64_t before = AddressBytes();
  const uint64_t bytes = 3 * kMiB + 1;
  void* const data = Map(bytes);
  EXPECT_EQ(AddressBytes() - before, 3 * kMiB + sysconf(_SC_PAGESIZE));
  UnmapSpread(data, bytes);
  EXPECT_EQ(AddressBytes(), before);
}

TEST_F(SpreadMappingTest, ShowsTheFileFromItsBegin) {
  for (const uint64_t bytes : {uint64_t{4096}, 5 * kMiB}) {
    const UniqueFd fd = FileOf(bytes);
    ASSERT_EQ(pwrite(fd.get(), "a", 1, 0), 1);
    ASSERT_EQ(pwrite(fd.get(), "z", 1, static_cast<off_t>(bytes) - 1), 1);
    auto* const data =
        static_cast<char*>(MapSpread(fd.get(), bytes, PROT_READ | PROT_WRITE));
    ASSERT_NE(data, MAP_FAILED);
    EXPECT_EQ(data[0], 'a');
    EXPECT_EQ(data[bytes - 1], 'z');
    data[1] = 'b';
    char written = 0;
    EXPECT_EQ(pread(fd.get(), &written, 1, 1), 1);
    EXPECT_EQ(written, 'b');
    UnmapSpread(data, bytes);
  }
}

TEST_F(SpreadMappingTest, SaysWhatMmapSaysAndKeepsNoAddress) {
  const uint64_t before = AddressBytes();
  EXPECT_EQ(MapSpread(-1, kPeriod, PROT_READ), MAP_FAILED);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(AddressBytes(), before);
}

TEST_F(SpreadMappingTest, MapsWhereAddressesAreScarce) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit scarce = before;
  scarce.rlim_cur = AddressBytes() + 64 * kMiB;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &scarce), 0);
  void* const data = Map(4 * kMiB);
  void* const too_large = MapSpread(FileOf(kPeriod).get(), kPeriod, PROT_READ);
  EXPECT_EQ(too_large, MAP_FAILED);
  EXPECT_EQ(errno, ENOMEM);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  UnmapSpread(data, 4 * kMiB);
}

TEST_F(SpreadMappingTest, MapsWhereEveryMappingIsLocked) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlim_t bytes = std::min<rlim_t>(64 * kMiB, before.rlim_max);
    const rlimit small = {.rlim_cur = bytes, .rlim_max = bytes};
    // The limit does not apply to root.
    if (setrlimit(RLIMIT_MEMLOCK, &small) != 0) _exit(3);
    if (getuid() == 0 && setuid(65534) != 0) _exit(4);
    if (mlockall(MCL_FUTURE) != 0) _exit(5);
    const UniqueFd fd = FileOf(4 * kMiB);
    _exit(MapSpread(fd.get(), 4 * kMiB, PROT_READ) == MAP_FAILED ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) > 1) {
    GTEST_SKIP() << "memory cannot be locked here: " << WEXITSTATUS(status);
  }
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// A fork of a trainer closes the parent's sessions.
TEST_F(SpreadMappingTest, AForkedChildMapsWhateverTheParentsThreadsDid) {
  std::atomic<bool> ends{false};
  std::thread other([&] {
    const UniqueFd fd = FileOf(2 * kMiB);
    while (!ends) {
      UnmapSpread(MapSpread(fd.get(), 2 * kMiB, PROT_READ), 2 * kMiB);
    }
  });
  for (int i = 0; i < 100; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const UniqueFd fd = FileOf(2 * kMiB);
      void* const data = MapSpread(fd.get(), 2 * kMiB, PROT_READ);
      if (data == MAP_FAILED) _exit(1);
      UnmapSpread(data, 2 * kMiB);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  ends = true;
  other.join();
}

}  // namespace
}  // namespace optstate::shm
