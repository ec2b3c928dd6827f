#include "proto/shm/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace optstate::shm {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// The result of neither call is checked: a waiter checks its condition in any
// case, and whether a waiter was woken does not matter.

void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
               absl::Duration timeout) {
  if (timeout <= absl::ZeroDuration()) return;
  const bool forever = timeout == absl::InfiniteDuration();
  const timespec relative = forever ? timespec{} : absl::ToTimespec(timeout);
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, forever ? nullptr : &relative,
          nullptr, 0);
}

void FutexWakeAll(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace optstate::shm
