#include "proto/shm/ring.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/shm/futex.h"

namespace optstate::shm {
namespace {

// Tells the core that this is a spin loop, so that its other hyperthread runs.
inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // `isb` and not `yield`, which is no pause at all on most cores.
  asm volatile("isb" ::: "memory");
#endif
}

// Calls `done` until it returns true or `limit` has passed; returns its last
// result. Yields the core every few microseconds: where cores are
// oversubscribed, the peer that would answer may be waiting for this very core.
// An answer in transit comes before the yield.
template <typename Done>
bool SpinUntil(absl::Duration limit, const Done& done) {
  // Reading the clock costs more than looking at a cached word.
  constexpr int kLooksPerClockRead = 64;
  // The limit is far from a value that overflows the clock.
  constexpr absl::Duration kLimitMax = absl::Hours(1);
  const auto end = std::chrono::steady_clock::now() +
                   absl::ToChronoNanoseconds(std::min(limit, kLimitMax));
  do {
    for (int i = 0; i < kLooksPerClockRead; ++i) {
      if (done()) return true;
      CpuRelax();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

absl::Status BadIndex(absl::string_view name, uint64_t theirs, uint64_t mine) {
  return absl::DataLossError(absl::StrCat(
      "the peer's ", name, " is ", theirs, " where this side is at ", mine,
      "; a ring has ", kRingEntries, " entries"));
}

}  // namespace

template <typename Entry>
absl::Status RingProducer<Entry>::Push(const Entry& entry) {
  const uint64_t head = peer_->consumed_head.load(std::memory_order_acquire);
  // Head and tail only grow from 0 and never wrap around.
  const uint64_t in_use = tail_ - head;
  if (head > tail_ || in_use > kRingEntries) {
    return BadIndex("head", head, tail_);
  }
  if (in_use == kRingEntries) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", kRingEntries, " entries of the ring are in use"));
  }
  std::memcpy(&entries_[tail_ % kRingEntries], &entry, sizeof(Entry));
  ++tail_;
  // Publishes, rings, then checks for a sleeper. The sleeper announces itself,
  // then checks for an entry. All accesses are seq_cst, so that one of the two
  // sees the other; the doorbell's new value keeps the sleeper out of the
  // kernel when it read the old one before its check.
  mine_->produced_tail.store(tail_, std::memory_order_seq_cst);
  mine_->doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (peer_->waiting.load(std::memory_order_seq_cst) != 0) {
    FutexWakeAll(mine_->doorbell);
  }
  return absl::OkStatus();
}

template <typename Entry>
absl::StatusOr<Poll> RingConsumer<Entry>::Take(Entry* entry) {
  const uint64_t tail = peer_->produced_tail.load(std::memory_order_acquire);
  const uint64_t ready = tail - head_;
  if (tail < head_ || ready > kRingEntries) {
    return BadIndex("tail", tail, head_);
  }
  if (ready == 0) return Poll::kEmpty;
  std::memcpy(entry, &entries_[head_ % kRingEntries], sizeof(Entry));
  return Poll::kEntry;
}

template <typename Entry>
void RingConsumer<Entry>::Release() {
  ++head_;
  mine_->consumed_head.store(head_, std::memory_order_release);
}

template <typename Entry>
bool RingConsumer<Entry>::Ready() const {
  return peer_->produced_tail.load(std::memory_order_seq_cst) != head_ ||
         mine_->interrupted.load(std::memory_order_seq_cst) != 0;
}

template <typename Entry>
void RingConsumer<Entry>::Wait(absl::Duration spin, absl::Duration sleep) {
  bool ready = Ready();
  if (!ready && spin > absl::ZeroDuration()) {
    ready = SpinUntil(spin, [this] { return Ready(); });
  }
  if (!ready && sleep > absl::ZeroDuration()) {
    const uint32_t rung = peer_->doorbell.load(std::memory_order_seq_cst);
    mine_->waiting.store(1, std::memory_order_seq_cst);
    if (!Ready()) FutexWait(peer_->doorbell, rung, sleep);
    mine_->waiting.store(0, std::memory_order_seq_cst);
  }
  mine_->interrupted.store(0, std::memory_order_seq_cst);
}

template <typename Entry>
void RingConsumer<Entry>::Interrupt() {
  mine_->interrupted.store(1, std::memory_order_seq_cst);
  // The doorbell belongs to the peer and cannot be rung from here, so a waiter
  // that checked just before the store above sleeps through a wake-up that
  // comes before it is in the kernel: repeat until the waiter is out again.
  while (mine_->waiting.load(std::memory_order_seq_cst) != 0 &&
         mine_->interrupted.load(std::memory_order_seq_cst) != 0) {
    FutexWakeAll(peer_->doorbell);
    sched_yield();
  }
}

uint64_t EntriesInUse(const RingSide& producer, const RingSide& consumer) {
  const uint64_t head = consumer.consumed_head.load(std::memory_order_relaxed);
  const uint64_t tail = producer.produced_tail.load(std::memory_order_relaxed);
  return tail < head ? 0 : std::min<uint64_t>(tail - head, kRingEntries);
}

template class RingProducer<Submission>;
template class RingProducer<Completion>;
template class RingConsumer<Submission>;
template class RingConsumer<Completion>;

}  // namespace optstate::shm
