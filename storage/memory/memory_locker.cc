#include "storage/memory/memory_locker.h"

#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>

// The kernel's ABI, newer than the headers of older systems.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MLOCK_ONFAULT
#define MLOCK_ONFAULT 1
#endif

namespace optstate::storage {
namespace {

// The bytes brought in at once: some milliseconds, for which calls that map or
// unmap memory wait.
constexpr uint64_t kPieceBytes = uint64_t{4} << 20;
// The niceness of the locker's thread: steps come first.
constexpr int kNice = 10;

uint64_t PageBytes() { return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)); }

// Locks what is in the page table, and what comes to be.
int LockOnFault(std::byte* begin, uint64_t bytes) {
  return ::syscall(SYS_mlock2, begin, bytes, MLOCK_ONFAULT) == 0 ? 0 : errno;
}

// Has the kernel put the pages into the page table.
int BringIn(std::byte* begin, uint64_t bytes) {
  if (::madvise(begin, bytes, MADV_POPULATE_READ) == 0) return 0;
  // EINVAL: the kernel is older than Linux 5.14. Locking anew brings them in.
  return ::mlock(begin, bytes) == 0 ? 0 : errno;
}

void RaiseSoftLimit() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return;
  if (limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_MEMLOCK, &limit);
}

bool MayIgnoreLimit() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};
  if (::syscall(SYS_capget, &header, data) != 0) return false;
  return (data[0].effective & (1u << CAP_IPC_LOCK)) != 0;
}

// Returns what this process has locked.
uint64_t LockedBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  uint64_t kilobytes = 0;
  while (status >> word) {
    if (word != "VmLck:") continue;
    status >> kilobytes;
    break;
  }
  return kilobytes * 1024;
}

}  // namespace

MemoryLocker::~MemoryLocker() {
  std::thread thread;
  {
    const absl::MutexLock lock(&mu_);
    stop_ = true;
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

uint64_t MemoryLocker::LimitBytes() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || MayIgnoreLimit() ||
      limit.rlim_max == RLIM_INFINITY) {
    return kUnlimited;
  }
  return limit.rlim_max;
}

uint64_t MemoryLocker::BytesLeft() {
  const uint64_t limit = LimitBytes();
  if (limit == kUnlimited) return kUnlimited;
  const uint64_t locked = LockedBytes();
  return limit > locked ? limit - locked : 0;
}

LockedRange MemoryLocker::Lock(absl::Span<std::byte> memory) {
  const uint64_t page = PageBytes();
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  std::byte* const begin = memory.data() - address % page;
  const uint64_t bytes =
      (address % page + memory.size() + page - 1) / page * page;
  RaiseSoftLimit();
  Range range;
  range.begin = begin;
  range.next = begin;
  uint64_t locked = bytes;
  range.error = LockOnFault(begin, bytes);
  if (range.error != 0) {
    locked = std::min(bytes, BytesLeft() / page * page);
    if (locked == bytes || locked == 0 || LockOnFault(begin, locked) != 0) {
      locked = 0;
    }
  }
  range.end = begin + locked;
  range.refused_bytes = bytes - locked;
  const absl::MutexLock lock(&mu_);
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  return LockedRange(this, ranges_.insert(ranges_.end(), range));
}

void MemoryLocker::Forget(Handle range) {
  const absl::MutexLock lock(&mu_);
  const auto is_left = [range] { return !range->is_busy; };
  mu_.Await(absl::Condition(&is_left));
  ranges_.erase(range);
}

MemoryLocker::Counts MemoryLocker::counts() const {
  const absl::MutexLock lock(&mu_);
  Counts counts;
  for (const Range& range : ranges_) {
    counts.locked_bytes += static_cast<uint64_t>(range.next - range.begin);
    counts.pending_bytes += static_cast<uint64_t>(range.end - range.next);
    counts.refused_bytes += range.refused_bytes;
    if (range.error != 0) counts.error = range.error;
  }
  return counts;
}

void MemoryLocker::AwaitSettled() const {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &MemoryLocker::IsSettled));
}

bool MemoryLocker::IsSettled() const {
  return std::all_of(ranges_.begin(), ranges_.end(), [](const Range& range) {
    return range.next == range.end;
  });
}

MemoryLocker::Handle MemoryLocker::NextPending() {
  return std::find_if(ranges_.begin(), ranges_.end(), [](const Range& range) {
    return range.next != range.end;
  });
}

bool MemoryLocker::HasWork() { return stop_ || NextPending() != ranges_.end(); }

void MemoryLocker::Run() {
  // Linux knows a thread's own nice value; 0: this thread.
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)),
                      kNice);
  const absl::MutexLock lock(&mu_);
  while (true) {
    mu_.Await(absl::Condition(this, &MemoryLocker::HasWork));
    if (stop_) return;
    const Handle range = NextPending();
    std::byte* const begin = range->next;
    const uint64_t bytes =
        std::min(static_cast<uint64_t>(range->end - begin), kPieceBytes);
    range->is_busy = true;
    mu_.Unlock();
    const int error = BringIn(begin, bytes);
    mu_.Lock();
    range->is_busy = false;
    if (error == 0) {
      range->next += bytes;
      continue;
    }
    range->error = error;
    range->refused_bytes += static_cast<uint64_t>(range->end - begin);
    range->end = begin;
  }
}

}  // namespace optstate::storage
