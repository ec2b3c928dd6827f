#include "storage/memory/memory_locker.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "proto/types/unique_fd.h"
#include "storage/memory/memory_region.h"
#include "storage/testing/lock_limit.h"

// Called when pages are brought in, on the thread that does it.
static std::atomic<const std::function<void()>*> on_bring_in = nullptr;

int RealAdvise(void* begin, size_t bytes, int advice) asm("__real_madvise");
int WrappedAdvise(void* begin, size_t bytes, int advice) asm("__wrap_madvise");
int WrappedAdvise(void* begin, size_t bytes, int advice) {
  constexpr int kPopulateRead = 22;
  const std::function<void()>* hook = on_bring_in;
  if (advice == kPopulateRead && hook != nullptr) (*hook)();
  return RealAdvise(begin, bytes, advice);
}

namespace optstate::storage {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

UniqueFd Memory(uint64_t bytes, bool reserved = true) {
  UniqueFd fd(::memfd_create("memory_locker_test", MFD_CLOEXEC));
  EXPECT_TRUE(fd.ok());
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  if (reserved) {
    EXPECT_EQ(::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes)), 0);
  }
  return fd;
}

MemoryRegion Map(const UniqueFd& fd, uint64_t bytes) {
  absl::StatusOr<MemoryRegion> region =
      MemoryRegion::MapShared(fd.get(), bytes);
  EXPECT_TRUE(region.ok()) << region.status();
  return *std::move(region);
}

// Returns the sum of a field of the mappings that begin within the region, as
// smaps has it, in bytes.
uint64_t BytesInSmaps(const MemoryRegion& region, absl::string_view field) {
  const auto begin = reinterpret_cast<uintptr_t>(region.data());
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool is_within = false;
  uint64_t kilobytes = 0;
  while (std::getline(smaps, line)) {
    const absl::string_view text = line;
    uintptr_t address = 0;
    const auto dash = text.find('-');
    if (dash != absl::string_view::npos &&
        absl::SimpleHexAtoi(text.substr(0, dash), &address)) {
      is_within = address >= begin && address < begin + region.size();
    } else if (is_within && text.substr(0, field.size()) == field) {
      uint64_t value = 0;
      const auto end = text.rfind(' ');
      EXPECT_TRUE(absl::SimpleAtoi(
          text.substr(field.size(), end - field.size()), &value));
      kilobytes += value;
    }
  }
  return kilobytes * 1024;
}

uint64_t BlocksOf(const UniqueFd& fd) {
  struct stat info = {};
  EXPECT_EQ(::fstat(fd.get(), &info), 0);
  return static_cast<uint64_t>(info.st_blocks);
}

// Says whether a thread of this process sleeps.
bool IsAsleep(int64_t thread) {
  std::ifstream file(absl::StrCat("/proc/self/task/", thread, "/stat"));
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat[name_end + 2] == 'S';
}

bool MayLock(uint64_t bytes) { return MemoryLocker::BytesLeft() >= bytes; }

TEST(MemoryLockerTest, BringsInAndLocksEveryPage) {
  constexpr uint64_t kBytes = 21 * kMiB;
  if (!MayLock(kBytes)) GTEST_SKIP() << "RLIMIT_MEMLOCK is too low here";
  MemoryLocker locker;
  const UniqueFd fd = Memory(kBytes);
  MemoryRegion region = Map(fd, kBytes);
  EXPECT_FALSE(region.is_locked());
  region.Lock(0, kBytes, &locker);
  EXPECT_TRUE(region.is_locked());
  locker.AwaitSettled();
  // Only the locker has touched the memory.
  EXPECT_EQ(BytesInSmaps(region, "Locked:"), kBytes);
  const MemoryLocker::Counts counts = locker.counts();
  EXPECT_EQ(counts.locked_bytes, kBytes);
  EXPECT_EQ(counts.pending_bytes, 0);
  EXPECT_EQ(counts.refused_bytes, 0);
  EXPECT_EQ(counts.error, 0);
  region = MemoryRegion();
  EXPECT_EQ(locker.counts().locked_bytes, 0);
}

// Bytes that were never reserved must take no memory.
TEST(MemoryLockerTest, LeavesHolesBesideARangeAlone) {
  constexpr uint64_t kBytes = 16 * kMiB;
  constexpr uint64_t kBegin = 6 * kMiB + 100;
  constexpr uint64_t kEnd = kBegin + 3 * kMiB;
  if (!MayLock(kBytes)) GTEST_SKIP() << "RLIMIT_MEMLOCK is too low here";
  MemoryLocker locker;
  const UniqueFd fd = Memory(kBytes, /*reserved=*/false);
  EXPECT_EQ(::posix_fallocate(fd.get(), kBegin, kEnd - kBegin), 0);
  const uint64_t blocks = BlocksOf(fd);
  MemoryRegion region = Map(fd, kBytes);
  region.Lock(kBegin, kEnd, &locker);
  locker.AwaitSettled();
  EXPECT_EQ(BlocksOf(fd), blocks);
  // Whole pages: of the first and the last one a part is asked for.
  EXPECT_EQ(BytesInSmaps(region, "Locked:"), 3 * kMiB + 4096);
  EXPECT_EQ(locker.counts().locked_bytes, 3 * kMiB + 4096);
}

TEST(MemoryLockerTest, LocksAsMuchAsTheLimitAllows) {
  EXPECT_TRUE(PassesWithLockLimit(5 * kMiB + 100, [] {
    constexpr uint64_t kBytes = 8 * kMiB;
    EXPECT_EQ(MemoryLocker::LimitBytes(), 5 * kMiB + 100);
    EXPECT_EQ(MemoryLocker::BytesLeft(), 5 * kMiB + 100);
    MemoryLocker locker;
    const UniqueFd small_fd = Memory(kMiB);
    MemoryRegion small = Map(small_fd, kMiB);
    small.Lock(0, kMiB, &locker);
    const UniqueFd large_fd = Memory(kBytes);
    MemoryRegion large = Map(large_fd, kBytes);
    large.Lock(0, kBytes, &locker);
    locker.AwaitSettled();
    EXPECT_EQ(BytesInSmaps(small, "Locked:"), kMiB);
    EXPECT_EQ(locker.counts().locked_bytes, 5 * kMiB);
    EXPECT_EQ(locker.counts().refused_bytes, 4 * kMiB);
    EXPECT_EQ(locker.counts().error, ENOMEM);
    EXPECT_LT(MemoryLocker::BytesLeft(), 4096);
    large = MemoryRegion();
    EXPECT_EQ(MemoryLocker::BytesLeft(), 4 * kMiB + 100);
    EXPECT_EQ(locker.counts().refused_bytes, 0);
  }));
}

TEST(MemoryLockerTest, LocksNothingWhereNothingMayBeLocked) {
  EXPECT_TRUE(PassesWithLockLimit(0, [] {
    MemoryLocker locker;
    const UniqueFd fd = Memory(kMiB);
    MemoryRegion region = Map(fd, kMiB);
    region.Lock(0, kMiB, &locker);
    locker.AwaitSettled();
    EXPECT_EQ(locker.counts().locked_bytes, 0);
    EXPECT_EQ(locker.counts().refused_bytes, kMiB);
    EXPECT_EQ(locker.counts().error, EPERM);
    EXPECT_EQ(BytesInSmaps(region, "Rss:"), 0);
  }));
}

// A range that ends while a piece of it is being brought in waits for that:
// else the thread would go on with what is mapped there next.
TEST(MemoryLockerTest, ARangeEndsAfterThePieceUnderWay) {
  if (!MayLock(kMiB)) GTEST_SKIP() << "RLIMIT_MEMLOCK is too low here";
  std::atomic<bool> is_held = false;
  std::atomic<bool> has_ended = false;
  std::atomic<bool> ended_too_early = false;
  const int64_t ender = ::syscall(SYS_gettid);
  const std::function<void()> hold = [&] {
    is_held = true;
    while (!has_ended && !IsAsleep(ender)) std::this_thread::yield();
    ended_too_early = has_ended.load();
  };
  const UniqueFd fd = Memory(kMiB);
  {
    MemoryLocker locker;  // joins its thread at its end
    {
      MemoryRegion region = Map(fd, kMiB);
      on_bring_in = &hold;
      region.Lock(0, kMiB, &locker);
      while (!is_held) std::this_thread::yield();
    }
    has_ended = true;
  }
  on_bring_in = nullptr;
  EXPECT_FALSE(ended_too_early);
}

}  // namespace
}  // namespace optstate::storage
