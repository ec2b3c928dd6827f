#include "kernels/cpu/stochastic.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/stochastic.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/ops/stochastic-inl.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Takes at most 2^32 elements: keys are of two multiples of it.
void RoundStochastically(uint32_t random_seed, int array, uint64_t flat,
                         const float* in, uint16_t* out, size_t numel) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const RandomKeys keys = RandomKeysOf(random_seed, flat);
  const int stream = RandomStreamOf(array);
  size_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    StoreRounded(d, hn::LoadU(d, in + i),
                 RandomVector(d, keys, stream, flat + i), array, out + i);
  }
  if (i == numel) return;
  constexpr size_t kLanes = hn::MaxLanes(d);
  HWY_ALIGN float tail_in[kLanes] = {};
  HWY_ALIGN uint16_t tail_out[kLanes];
  std::memcpy(tail_in, in + i, (numel - i) * sizeof(float));
  StoreRounded(d, hn::Load(d, tail_in), RandomVector(d, keys, stream, flat + i),
               array, tail_out);
  std::memcpy(out + i, tail_out, (numel - i) * sizeof(uint16_t));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::kernels::cpu {
namespace {

constexpr auto kRoundStochastically =
    OPTSTATE_TARGET_TABLE(RoundStochastically);

}  // namespace

void RoundStochasticallyOn(Target target, uint32_t random_seed, int array,
                           uint64_t flat, const float* in, void* out,
                           size_t numel) {
  constexpr size_t kElementsMax = size_t{1} << 32;
  for (size_t i = 0; i < numel; i += kElementsMax) {
    kRoundStochastically.For(target)(random_seed, array, flat + i, in + i,
                                     static_cast<uint16_t*>(out) + i,
                                     std::min(kElementsMax, numel - i));
  }
}

}  // namespace optstate::kernels::cpu

#endif  // HWY_ONCE
