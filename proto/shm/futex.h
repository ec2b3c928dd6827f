#ifndef OPTSTATE_PROTO_SHM_FUTEX_H_
#define OPTSTATE_PROTO_SHM_FUTEX_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace optstate::shm {

// Futexes between processes: the kernel finds the word by the file and offset
// that back the mapping, so both sides may map it anywhere, and a read-only
// mapping is enough to wait on the word and to wake its waiters.

// Returns when woken, when the word is not `expected`, after `timeout`, on a
// signal, or for no reason at all: the caller checks its condition again.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
               absl::Duration timeout);

// Wakes every waiter. Waking one would not be enough: the memory is shared with
// a peer that may wait on the word too.
void FutexWakeAll(const std::atomic<uint32_t>& word);

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_FUTEX_H_
