// bfloat16 state arrays, rounded stochastically. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_STOCHASTIC_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_STOCHASTIC_INL_H_
#undef OPTSTATE_KERNELS_CPU_STOCHASTIC_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_STOCHASTIC_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/random_bits.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The keys of one step. State arrays 0 and 1 share a stream, 16 bits each;
// array 2 has the other.
struct RandomKeys {
  uint64_t high;  // of the first element's flat position, by 2^32
  // [stream][0: of the elements up to the next multiple of 2^32, 1: beyond]
  RandomKey key[2][2];
};

inline RandomKeys RandomKeysOf(uint32_t seed, uint64_t flat) {
  const uint64_t high = flat >> 32;
  return {high,
          {{RandomKeyOf(seed, 0, high), RandomKeyOf(seed, 0, high + 1)},
           {RandomKeyOf(seed, 1, high), RandomKeyOf(seed, 1, high + 1)}}};
}

// Computes RandomBits of random_bits.h, given index and key of each lane.
template <class DU, class VU>
HWY_INLINE VU MixBits(DU du, VU index, VU first, VU second) {
  auto x = hn::Xor(index, first);
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)),
              hn::Set(du, kRandomMultiplier1));
  x = hn::Add(hn::Xor(x, hn::ShiftRight<15>(x)), second);
  x = hn::Mul(x, hn::Set(du, kRandomMultiplier2));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// Returns the bits of elements `low`, `low` + 1, ... of `key`, and of the next
// key behind 2^32. Seldom called; kept out of the loop's code.
template <class D>
HWY_NOINLINE hn::Vec<hn::RebindToUnsigned<D>> RandomAcross(D, RandomKey key,
                                                           RandomKey next_key,
                                                           uint32_t low) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto index = hn::Iota(du, low);
  // Lanes behind the 2^32nd element belong to the next key.
  const auto sign = hn::Set(du, 0x80000000u);
  const auto has_wrapped = hn::RebindMask(
      du, hn::Lt(hn::BitCast(di, hn::Xor(index, sign)),
                 hn::BitCast(di, hn::Xor(hn::Set(du, low), sign))));
  const auto first = hn::IfThenElse(has_wrapped, hn::Set(du, next_key.first),
                                    hn::Set(du, key.first));
  const auto second = hn::IfThenElse(has_wrapped, hn::Set(du, next_key.second),
                                     hn::Set(du, key.second));
  return MixBits(du, index, first, second);
}

// Returns the 32 random bits each of elements flat, flat + 1, ... in the
// stream.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RandomVector(D d,
                                                         const RandomKeys& keys,
                                                         int stream,
                                                         uint64_t flat) {
  const hn::RebindToUnsigned<D> du;
  const auto& both = keys.key[stream];
  const RandomKey key = both[flat >> 32 != keys.high ? 1 : 0];
  const auto low = static_cast<uint32_t>(flat);
  if (HWY_UNLIKELY(low > UINT32_MAX - (hn::Lanes(d) - 1))) {
    return RandomAcross(d, key, both[1], low);
  }
  return MixBits(du, hn::Iota(du, low), hn::Set(du, key.first),
                 hn::Set(du, key.second));
}

// Returns the stream of state array k.
constexpr int RandomStreamOf(int k) { return k / 2; }

// Stores `v` cut to bfloat16, after adding, to the bits that are cut off, the
// 16 bits of the stream that are state array k's. A NaN is the canonical one,
// which stays.
template <class D, class V, class VU>
HWY_INLINE void StoreRounded(D d, V v, VU bits, int k, uint16_t* to) {
  const hn::RebindToUnsigned<D> du;
  const auto random = k % 2 == 0 ? hn::ShiftRight<16>(bits)
                                 : hn::And(bits, hn::Set(du, 0xFFFF));
  const auto rounded = hn::Add(hn::BitCast(du, v), random);
  StoreHalves(d, hn::ShiftRight<16>(rounded), to);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
