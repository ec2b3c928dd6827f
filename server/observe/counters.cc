#include "server/observe/counters.h"

#include <array>
#include <atomic>

namespace optstate::observe {
namespace {

using Counter = std::atomic<uint64_t>;

std::array<Counter, static_cast<size_t>(Counted::kEnd)> counted;
std::array<std::array<Counter, kCodes>, static_cast<size_t>(Answered::kEnd)>
    answered;

Counter& CounterOf(Answered what, absl::StatusCode code) {
  const auto number = static_cast<size_t>(code);
  // A number that absl does not know comes from a peer's library.
  const auto unknown = static_cast<size_t>(absl::StatusCode::kUnknown);
  return answered[static_cast<size_t>(what)]
                 [number < kCodes ? number : unknown];
}

}  // namespace

void Count(Counted what) {
  counted[static_cast<size_t>(what)].fetch_add(1, std::memory_order_relaxed);
}

void Count(Answered what, absl::StatusCode code) {
  CounterOf(what, code).fetch_add(1, std::memory_order_relaxed);
}

uint64_t CountOf(Counted what) {
  return counted[static_cast<size_t>(what)].load(std::memory_order_relaxed);
}

uint64_t CountOf(Answered what, absl::StatusCode code) {
  return CounterOf(what, code).load(std::memory_order_relaxed);
}

}  // namespace optstate::observe
