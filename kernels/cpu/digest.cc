#include "kernels/cpu/digest.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/highway_config.h"
#include "kernels/cuda/digest.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/digest.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Sums = hn::ScalableTag<uint64_t>;
using Words = hn::Rebind<uint32_t, Sums>;

// A lane has every n-th word of n lanes. The weight of a word grows along its
// lane, so that no word is multiplied: of r words, the sum of a lane's sums so
// far has the k-th one r - k times.
uint64_t Digest(const void* data, uint64_t bytes) {
  const Sums d;
  const Words words;
  const auto* const begin = static_cast<const std::byte*>(data);
  const uint64_t lanes = hn::Lanes(d);
  const uint64_t round_bytes = lanes * sizeof(uint32_t);
  const uint64_t rounds = bytes / round_bytes;
  auto sums = hn::Zero(d);
  auto sums_so_far = hn::Zero(d);
  for (uint64_t at = 0; at < rounds * round_bytes; at += round_bytes) {
    const auto added =
        hn::LoadU(words, reinterpret_cast<const uint32_t*>(begin + at));
    sums = hn::Add(sums, hn::PromoteTo(d, added));
    sums_so_far = hn::Add(sums_so_far, sums);
  }
  uint64_t sum = 0;
  uint64_t weighted = 0;
  alignas(64) uint64_t of_lane[hn::MaxLanes(d)];
  alignas(64) uint64_t so_far[hn::MaxLanes(d)];
  hn::StoreU(sums, d, of_lane);
  hn::StoreU(sums_so_far, d, so_far);
  for (uint64_t lane = 0; lane < lanes; ++lane) {
    sum += of_lane[lane];
    weighted += (lane + 1) * of_lane[lane] +
                lanes * (rounds * of_lane[lane] - so_far[lane]);
  }
  uint64_t number = rounds * lanes;
  for (uint64_t at = rounds * round_bytes; at < bytes; at += sizeof(uint32_t)) {
    uint32_t word = 0;
    std::memcpy(&word, begin + at,
                std::min<uint64_t>(bytes - at, sizeof(word)));
    sum += word;
    weighted += ++number * word;
  }
  return cuda::DigestOfSums(sum, weighted);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::kernels::cpu {
namespace {

constexpr auto kDigest = OPTSTATE_TARGET_TABLE(Digest);

}  // namespace

uint64_t DigestOn(Target target, const void* data, uint64_t bytes) {
  return kDigest.For(target)(data, bytes);
}

}  // namespace optstate::kernels::cpu

#endif  // HWY_ONCE
