#ifndef OPTSTATE_STORAGE_MEMORY_MEMORY_LOCKER_H_
#define OPTSTATE_STORAGE_MEMORY_MEMORY_LOCKER_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace optstate::storage {

class LockedRange;

// Locks ranges of mapped files in memory, so that their pages never go to swap.
//
// A range is locked at once, which takes microseconds: pages that this process
// has in its page table stay, and others stay from the moment they are there. A
// thread then brings these in, from swap too, in small pieces at a low
// priority. So the caller never waits for the size of its memory.
//
// The kernel bounds what one process locks by RLIMIT_MEMLOCK, unless the
// process has CAP_IPC_LOCK; the locker raises the soft limit to the hard one.
// Locks end with the mapping and with the process.
//
// Threads: thread-safe.
class MemoryLocker {
 public:
  struct Counts {
    uint64_t locked_bytes = 0;
    uint64_t pending_bytes = 0;  // not brought in yet
    uint64_t refused_bytes = 0;
    int error = 0;  // errno of a refusal: the latest; 0: none
  };
  static constexpr uint64_t kUnlimited = UINT64_MAX;

  MemoryLocker() = default;
  MemoryLocker(const MemoryLocker&) = delete;
  MemoryLocker& operator=(const MemoryLocker&) = delete;
  // The caller has ended all ranges.
  ~MemoryLocker();

  // Locks the pages of a range of a mapping, from its beginning on as far as
  // the limit allows. All its bytes have their blocks. The range must end
  // before the mapping does.
  LockedRange Lock(absl::Span<std::byte> memory);

  // Returns the sums over all ranges.
  Counts counts() const;
  // Waits until nothing is pending.
  void AwaitSettled() const;

  // Returns how many bytes this process may lock beside what it has locked, or
  // kUnlimited.
  static uint64_t BytesLeft();
  // Returns the limit of this process in bytes, or kUnlimited.
  static uint64_t LimitBytes();

 private:
  friend class LockedRange;
  struct Range {
    std::byte* begin = nullptr;
    std::byte* end = nullptr;   // of what is locked
    std::byte* next = nullptr;  // not brought in yet from here on
    uint64_t refused_bytes = 0;
    int error = 0;
    bool is_busy = false;  // the thread is at it
  };
  using Handle = std::list<Range>::iterator;

  void Forget(Handle range);
  void Run();
  Handle NextPending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsSettled() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  std::list<Range> ranges_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // from the first range on
};

// A range that its locker counts and brings in, until this object's end, which
// waits for the piece that is being brought in. The pages stay locked as long
// as they are mapped. Move-only.
class LockedRange {
 public:
  LockedRange(LockedRange&& other) noexcept
      : locker_(std::exchange(other.locker_, nullptr)), range_(other.range_) {}
  LockedRange& operator=(LockedRange&&) = delete;
  ~LockedRange() {
    if (locker_ != nullptr) locker_->Forget(range_);
  }

 private:
  friend class MemoryLocker;
  LockedRange(MemoryLocker* locker, MemoryLocker::Handle range)
      : locker_(locker), range_(range) {}

  MemoryLocker* locker_;
  MemoryLocker::Handle range_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_MEMORY_MEMORY_LOCKER_H_
