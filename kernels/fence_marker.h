#ifndef OPTSTATE_KERNELS_FENCE_MARKER_H_
#define OPTSTATE_KERNELS_FENCE_MARKER_H_

#include <cstdint>
#include <cstring>
#include <optional>

#include "kernels/undo_fence.h"

namespace optstate::kernels {

// Returns the fence that is the next instruction of a child forked from this
// process, in code with OPTSTATE_FENCE_MARKERS; none when the next instruction
// is another.
inline std::optional<UndoFence> MarkerAt(uintptr_t instruction) {
  // The child's code is ours.
  const auto* code = reinterpret_cast<const uint8_t*>(instruction);
  uint32_t number = 0;
#if defined(__x86_64__)
  static constexpr uint8_t kOpcode[] = {0x0F, 0x1F, 0x84, 0x00};
  for (size_t i = 0; i < sizeof(kOpcode); ++i) {
    if (code[i] != kOpcode[i]) return std::nullopt;
  }
  std::memcpy(&number, code + sizeof(kOpcode), sizeof(number));
  number -= 0x0F5E0000;
#else
  std::memcpy(&number, code, sizeof(number));
  if ((number & 0xFFE0001F) != 0xD280001F) return std::nullopt;
  number = (number >> 5 & 0xFFFF) - 0xF500;
#endif
  if (number >= kUndoFences) return std::nullopt;
  return static_cast<UndoFence>(number);
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_FENCE_MARKER_H_
