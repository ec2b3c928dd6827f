#include "kernels/cpu/dynamic.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dynamic.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/dynamic-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {

// Decodes a block, or what there is of the last one.
void Decode(bool is_signed, const uint8_t* codes, float scale, float* values,
            size_t numel) {
  uint8_t block_codes[kQuantizedBlockElements] = {};
  float block_values[kQuantizedBlockElements];
  std::memcpy(block_codes, codes, numel);
  is_signed ? DecodeBlock<true>(block_codes, scale, block_values)
            : DecodeBlock<false>(block_codes, scale, block_values);
  std::memcpy(values, block_values, numel * sizeof(float));
}

float Encode(bool is_signed, const float* values, uint8_t* codes,
             size_t numel) {
  uint8_t block_codes[kQuantizedBlockElements];
  float block_values[kQuantizedBlockElements] = {};
  std::memcpy(block_values, values, numel * sizeof(float));
  const float scale = is_signed ? EncodeBlock<true>(block_values, block_codes)
                                : EncodeBlock<false>(block_values, block_codes);
  std::memcpy(codes, block_codes, numel);
  return scale;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::kernels::cpu {
namespace {

constexpr auto kDecode = OPTSTATE_TARGET_TABLE(Decode);
constexpr auto kEncode = OPTSTATE_TARGET_TABLE(Encode);

}  // namespace

void DecodeOn(Target target, bool is_signed, const void* codes,
              const float* scale, float* values, size_t numel) {
  for (size_t i = 0; i < numel; i += kQuantizedBlockElements) {
    kDecode.For(target)(is_signed, static_cast<const uint8_t*>(codes) + i,
                        scale[i / kQuantizedBlockElements], values + i,
                        std::min(kQuantizedBlockElements, numel - i));
  }
}

void EncodeOn(Target target, bool is_signed, const float* values, void* codes,
              float* scale, size_t numel) {
  for (size_t i = 0; i < numel; i += kQuantizedBlockElements) {
    scale[i / kQuantizedBlockElements] = kEncode.For(target)(
        is_signed, values + i, static_cast<uint8_t*>(codes) + i,
        std::min(kQuantizedBlockElements, numel - i));
  }
}

}  // namespace optstate::kernels::cpu

#endif  // HWY_ONCE
