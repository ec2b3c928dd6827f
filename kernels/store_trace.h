#ifndef OPTSTATE_KERNELS_STORE_TRACE_H_
#define OPTSTATE_KERNELS_STORE_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "kernels/undo_fence.h"

namespace optstate::kernels {

// Four bytes that were stored, or one of the words (TraceStores), which are
// atomic and therefore whole: a compiler may store anything else in parts.
struct StoredPiece {
  size_t offset;
  size_t bytes;
  uint64_t value;
};

// The stores of some code into some memory, between the fences that it passes.
struct StoreTrace {
  // The number of instructions; negative: no child can be traced here.
  int64_t instructions = -1;
  std::vector<std::byte> initial;
  // Segment i has the stores between fence i - 1 and fence i, in their order. A
  // store that does not change the memory is not seen.
  std::vector<std::vector<StoredPiece>> segments;
  struct FenceSeen {
    UndoFence which;
    std::vector<uint64_t> words;  // the words' values here
  };
  std::vector<FenceSeen> fences;
};

// Runs `work`, code with OPTSTATE_FENCE_MARKERS, in a child that shares
// `memory`, which begins with `words` words of 8 bytes, all atomic.
StoreTrace TraceStores(absl::Span<std::byte> memory, size_t words,
                       const std::function<void()>& work);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_STORE_TRACE_H_
