#include "server/scheduler/worker_pool.h"

#include <pthread.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace optstate {
namespace {

// Some 20 to 50 microseconds, the price of waking a sleeper on another core:
// whoever spins longer than that has lost more than the sleep would have cost.
constexpr int kSpinRounds = 1000;

thread_local int current_participant = 0;

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

WorkerPool::WorkerPool(int participants, bool spin)
    : spin_rounds_(spin ? kSpinRounds : 0) {
  const int threads = std::max(participants, 1) - 1;
  threads_.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this, i] { Run(i + 1); });
    const std::string name = absl::StrCat("update-", i + 1);
    pthread_setname_np(threads_.back().native_handle(), name.c_str());
  }
}

WorkerPool::~WorkerPool() {
  stop_.store(true, std::memory_order_relaxed);
  doorbell_.fetch_add(1, std::memory_order_release);
  doorbell_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::ParallelFor(size_t count,
                             absl::FunctionRef<void(size_t)> body) {
  if (count <= 1 || threads_.empty()) {
    for (size_t i = 0; i < count; ++i) body(i);
    return;
  }
  body_ = &body;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  doorbell_.fetch_add(1, std::memory_order_release);
  if (count - 1 >= threads_.size()) {
    doorbell_.notify_all();
  } else {
    for (size_t i = 1; i < count; ++i) doorbell_.notify_one();
  }
  Work();
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  AwaitEmptyGate();
}

void WorkerPool::Work() {
  const size_t count = count_;
  const absl::FunctionRef<void(size_t)>& body = *body_;
  for (size_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count;
       i = next_.fetch_add(1, std::memory_order_relaxed)) {
    body(i);
  }
}

int WorkerPool::CurrentParticipant() { return current_participant; }

void WorkerPool::Run(int participant) {
  current_participant = participant;
  uint32_t seen = 0;
  while (true) {
    seen = AwaitDoorbell(seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!Join()) continue;
    Work();
    Leave();
  }
}

bool WorkerPool::Join() {
  uint32_t gate = gate_.load(std::memory_order_relaxed);
  while ((gate & kOpen) != 0) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire,
                                    std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

void WorkerPool::Leave() {
  // The release pairs with AwaitEmptyGate: the bodies' writes come with it.
  if (gate_.fetch_sub(1, std::memory_order_release) == 1) gate_.notify_one();
}

uint32_t WorkerPool::AwaitDoorbell(uint32_t seen) {
  for (int round = 0; round < spin_rounds_; ++round) {
    const uint32_t now = doorbell_.load(std::memory_order_acquire);
    if (now != seen) return now;
    Pause();
  }
  doorbell_.wait(seen, std::memory_order_acquire);
  return doorbell_.load(std::memory_order_acquire);
}

void WorkerPool::AwaitEmptyGate() {
  int rounds = spin_rounds_;
  uint32_t gate = gate_.load(std::memory_order_acquire);
  while (gate != 0) {
    if (rounds-- > 0) {
      Pause();
    } else {
      gate_.wait(gate, std::memory_order_acquire);
    }
    gate = gate_.load(std::memory_order_acquire);
  }
}

}  // namespace optstate
