#include "client/views/streaming_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace optstate::client {
namespace {

#if defined(__SSE2__)
// The smallest copy that bypasses the cache. Smaller copies stay in the cache,
// where the engine finds them. The C library waits for some multiple of the
// last-level cache, which is shared by all cores.
constexpr size_t kStreamBytesMin = 256 << 10;
// The total from which parts bypass the cache, because nothing of them would
// stay there.
constexpr size_t kStreamInAllMin = 8 << 20;
// The smallest such part: a few whole lines.
constexpr size_t kStreamPartMin = 512;
constexpr size_t kLineBytes = 64;

// Copies whole lines: `to` is aligned to a line; `bytes` is a multiple of it.
void StreamLines(std::byte* to, const std::byte* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLineBytes) {
    const auto* source = reinterpret_cast<const __m128i*>(from + i);
    auto* target = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}
#endif

}  // namespace

void StreamingCopy(void* to, const void* from, size_t bytes,
                   [[maybe_unused]] size_t in_all) {
  if (bytes == 0) return;
#if defined(__SSE2__)
  const size_t least =
      in_all >= kStreamInAllMin ? kStreamPartMin : kStreamBytesMin;
  if (bytes >= least) {
    auto* target = static_cast<std::byte*>(to);
    const auto* source = static_cast<const std::byte*>(from);
    const size_t head =
        (kLineBytes - reinterpret_cast<uintptr_t>(target) % kLineBytes) %
        kLineBytes;
    const size_t lines = (bytes - head) / kLineBytes * kLineBytes;
    std::memcpy(target, source, head);
    StreamLines(target + head, source + head, lines);
    std::memcpy(target + head + lines, source + head + lines,
                bytes - head - lines);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

void StreamingFence() {
#if defined(__SSE2__)
  // Only the fence orders streaming stores.
  _mm_sfence();
#endif
}

}  // namespace optstate::client
