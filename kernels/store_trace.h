#ifndef OPTSTATE_KERNELS_STORE_TRACE_H_
#define OPTSTATE_KERNELS_STORE_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "kernels/undo_fence.h"

namespace optstate {

// Four bytes that were stored, or one of the words (TraceStores), which are
// atomic and therefore whole: of all else a compiler may store parts.
struct StoredPiece {
  size_t offset;
  size_t bytes;
  uint64_t value;
};

// What code stores into some memory, between the fences that it comes through.
struct StoreTrace {
  // Number of instructions; negative: no child can be traced here.
  int64_t instructions = -1;
  std::vector<std::byte> initial;
  // Of segment i the stores between fence i - 1 and fence i, in their order.
  // One that does not change what is there is not seen.
  std::vector<std::vector<StoredPiece>> segments;
  struct FenceSeen {
    UndoFence which;
    std::vector<uint64_t> words;  // what they are here
  };
  std::vector<FenceSeen> fences;
};

// Runs `work`, code with OPTSTATE_FENCE_MARKERS, in a child that shares
// `memory`, whose first `words` are of 8 bytes and atomic.
StoreTrace TraceStores(absl::Span<std::byte> memory, size_t words,
                       const std::function<void()>& work);

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_STORE_TRACE_H_
