// State arrays of bytes, block by block. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_DYNAMIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_DYNAMIC_INL_H_
#undef OPTSTATE_KERNELS_CPU_DYNAMIC_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_DYNAMIC_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/ops/dynamic_codes-inl.h"
#include "kernels/update_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Decodes the codes of one block. Reads and writes whole vectors: 256 codes and
// floats.
template <bool kSigned>
HWY_NOINLINE void DecodeBlock(const uint8_t* codes, float scale,
                              float* values) {
  const auto* from = reinterpret_cast<const CodeOf<kSigned>*>(codes);
  const hn::ScalableTag<float> d;
  const BlockDecoder<kSigned> decoder(scale);
  for (size_t i = 0; i < kQuantizedBlockElements; i += hn::Lanes(d)) {
    hn::StoreU(decoder.Load(d, from + i), d, values + i);
  }
}

// Returns the largest absolute value; NaN wins, and is canonical.
inline float LargestOf(const float* values) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  auto largest = hn::Zero(di);
  for (size_t i = 0; i < kQuantizedBlockElements; i += hn::Lanes(d)) {
    const auto value = hn::Abs(hn::LoadU(d, values + i));
    largest = hn::Max(largest, hn::BitCast(di, value));
  }
  HWY_ALIGN int32_t lanes[hn::MaxLanes(di)];
  hn::Store(largest, di, lanes);
  int32_t bits = 0;
  for (size_t k = 0; k < hn::Lanes(di); ++k) bits = std::max(bits, lanes[k]);
  return ScaleOf(bits);
}

// Writes the nearest codes of one block's values; returns their scale. Reads
// and writes whole vectors, 256 floats and codes, and may change the values.
template <bool kSigned>
HWY_NOINLINE float EncodeBlock(float* values, uint8_t* codes) {
  auto* to = reinterpret_cast<CodeOf<kSigned>*>(codes);
  const hn::ScalableTag<float> d;
  const float scale = LargestOf(values);
  const BlockEncoder<kSigned> encoder(scale);
  if (encoder.IsZero()) {
    std::memset(codes, 0, kQuantizedBlockElements);
    return scale;
  }
  if (encoder.NeedsNormalizing()) {
    for (size_t i = 0; i < kQuantizedBlockElements; ++i) {
      values[i] = encoder.Normalized(values[i]);
    }
  }
  for (size_t i = 0; i < kQuantizedBlockElements; i += hn::Lanes(d)) {
    encoder.Store(d, hn::LoadU(d, values + i), to + i);
  }
  return scale;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
