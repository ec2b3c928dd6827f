#include "server/observe/counters.h"

#include <array>
#include <atomic>

namespace optstate::observe {
namespace {

using Counter = std::atomic<uint64_t>;

std::array<Counter, static_cast<size_t>(Counted::kEnd)> counted;
std::array<std::array<Counter, kCodes>, static_cast<size_t>(Answered::kEnd)>
    answered;
std::array<Counter, static_cast<size_t>(Queue::kEnd)> lengths;

Counter& CounterOf(Queue queue) { return lengths[static_cast<size_t>(queue)]; }

Counter& CounterOf(Answered what, absl::StatusCode code) {
  return answered[static_cast<size_t>(what)][NumberOf(code)];
}

}  // namespace

void Count(Counted what) {
  counted[static_cast<size_t>(what)].fetch_add(1, std::memory_order_relaxed);
}

void Count(Answered what, absl::StatusCode code) {
  CounterOf(what, code).fetch_add(1, std::memory_order_relaxed);
}

InQueue::InQueue(Queue queue) : queue_(queue) {
  CounterOf(queue).fetch_add(1, std::memory_order_relaxed);
}

InQueue::~InQueue() {
  if (!queue_.has_value()) return;
  CounterOf(*queue_).fetch_sub(1, std::memory_order_relaxed);
}

uint64_t LengthOf(Queue queue) {
  return CounterOf(queue).load(std::memory_order_relaxed);
}

uint64_t CountOf(Counted what) {
  return counted[static_cast<size_t>(what)].load(std::memory_order_relaxed);
}

uint64_t CountOf(Answered what, absl::StatusCode code) {
  return CounterOf(what, code).load(std::memory_order_relaxed);
}

}  // namespace optstate::observe
