#include "kernels/store_trace.h"

#include <sys/types.h>

#include <cstring>
#include <optional>

#include "kernels/fence_marker.h"
#include "kernels/single_step.h"

namespace optstate::kernels {
namespace {

// Adds the pieces that differ, in the order of their addresses.
void AddDifference(absl::Span<const std::byte> before,
                   absl::Span<const std::byte> after, size_t words,
                   std::vector<StoredPiece>* pieces) {
  constexpr size_t kStride = 64;
  size_t offset = 0;
  while (offset < after.size()) {
    const bool is_stride =
        offset % kStride == 0 && offset + kStride <= after.size();
    if (is_stride && std::memcmp(before.data() + offset, after.data() + offset,
                                 kStride) == 0) {
      offset += kStride;
      continue;
    }
    StoredPiece piece = {offset, offset < words * 8 ? 8u : 4u, 0};
    if (std::memcmp(before.data() + offset, after.data() + offset,
                    piece.bytes) != 0) {
      std::memcpy(&piece.value, after.data() + offset, piece.bytes);
      pieces->push_back(piece);
    }
    offset += piece.bytes;
  }
}

}  // namespace

StoreTrace TraceStores(absl::Span<std::byte> memory, size_t words,
                       const std::function<void()>& work) {
  StoreTrace trace;
  trace.initial.assign(memory.begin(), memory.end());
  trace.segments.emplace_back();
  std::vector<std::byte> last = trace.initial;
  trace.instructions = StepChildThrough(work, [&](pid_t child, int64_t) {
    if (std::memcmp(last.data(), memory.data(), memory.size()) != 0) {
      AddDifference(last, memory, words, &trace.segments.back());
      std::memcpy(last.data(), memory.data(), memory.size());
    }
    const uintptr_t next = NextInstruction(child);
    if (next == 0) return false;
    const std::optional<UndoFence> fence = MarkerAt(next);
    if (fence.has_value()) {
      StoreTrace::FenceSeen seen = {*fence, std::vector<uint64_t>(words)};
      std::memcpy(seen.words.data(), memory.data(), words * 8);
      trace.fences.push_back(std::move(seen));
      trace.segments.emplace_back();
    }
    return true;
  });
  return trace;
}

}  // namespace optstate::kernels
