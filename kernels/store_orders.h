#ifndef OPTSTATE_KERNELS_STORE_ORDERS_H_
#define OPTSTATE_KERNELS_STORE_ORDERS_H_

#include <cstddef>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/store_trace.h"

namespace optstate::kernels {

// The memory that the stores of a trace may leave when they are interrupted, in
// any order that the compiler could have given them: those between two fences
// in any, but stores to the same place keep theirs. The values are those of the
// trace: whatever a compiler makes of loads, it may not change the values.
struct StoreOrders {
  // Says which fence of the trace to treat as if it were not there. Then
  // nothing is tried but what that fence kept apart.
  std::function<bool(size_t fence)> is_removed;
  // Says whether what is left is brought to the right end.
  std::function<bool(absl::Span<const std::byte> memory)> recovers;
  std::mt19937* random = nullptr;
  // Each segment is interrupted with each store alone done, with each alone not
  // done, and so many times anywhere in a random order.
  size_t random_orders = 100;
};

struct StoreOrderResult {
  size_t tried = 0;
  // The order that was not recovered, where trying ends; empty: all were.
  std::string lost;
};

StoreOrderResult TryStoreOrders(const StoreTrace& trace,
                                const StoreOrders& orders);

// The purpose of each fence of a trace: "before progress of state 0". "" where
// there are no stores on one side. `progress_word`: where UndoSlot::progress
// is.
using FenceNames = std::vector<std::string>;
FenceNames NamesOf(const StoreTrace& trace, size_t progress_word);

// Expects all orders that the fences leave to be recovered, through GoogleTest.
// Returns the names of fences without which some order is not; adds to `tried`
// the number of orders.
std::set<std::string> NeededFences(const StoreTrace& trace,
                                   const FenceNames& names,
                                   const StoreOrders& orders, size_t* tried);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_STORE_ORDERS_H_
