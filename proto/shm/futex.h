#ifndef OPTSTATE_PROTO_SHM_FUTEX_H_
#define OPTSTATE_PROTO_SHM_FUTEX_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace optstate::shm {

// Futexes between processes: the word is found by the file and offset that it
// is mapped from, so both sides may map it anywhere, and a read-only mapping is
// enough to wait on it and to wake its waiters.

// Returns when woken, when the word is not `expected`, after `timeout`, on a
// signal, or for no reason at all: the caller looks again.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
               absl::Duration timeout);

// Wakes every waiter: only one of them is ours to count on, for the memory is
// shared with a peer that may wait on the word too.
void FutexWakeAll(const std::atomic<uint32_t>& word);

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_FUTEX_H_
