#ifndef OPTSTATE_KERNELS_UNDO_FENCE_H_
#define OPTSTATE_KERNELS_UNDO_FENCE_H_

#include <atomic>
#include <cstdint>

namespace optstate::kernels {

// The fences of undo.h and, from kBeforeRun on, of a worker's undo memory
// (server/scheduler/worker_undo.h), named by what they keep apart.
enum class UndoFence : uint32_t {
  kBeforeProgress,
  kBehindProgress,
  kBeforeSaved,
  kBehindSaved,
  kBeforeRun,
  kBeforeKind,
  kBehindKind,
  kBeforeStamp,
  kBehindStamp,
};
inline constexpr uint32_t kUndoFences = 9;

// Keeps the compiler from moving stores across the fence, and costs no
// instruction. Compilers seldom would move them, so a missing fence would go
// unnoticed. Therefore OPTSTATE_FENCE_MARKERS, which only tests define, makes
// the fence an instruction that does nothing but mark its place: a test then
// performs the stores between two markers in any order (fence_marker.h).
template <UndoFence kWhich>
inline void Fence() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
#ifdef OPTSTATE_FENCE_MARKERS
#if defined(__x86_64__)
  // nopl number(%rax,%rax)
  asm volatile(".byte 0x0f, 0x1f, 0x84, 0x00\n\t.long %c0" ::"i"(
                   0x0F5E0000 + static_cast<uint32_t>(kWhich))
               : "memory");
#elif defined(__aarch64__)
  asm volatile("movz xzr, %0" ::"i"(0xF500 + static_cast<uint32_t>(kWhich))
               : "memory");
#else
#error "an instruction that does nothing and carries a number"
#endif
#endif
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_UNDO_FENCE_H_
