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

// Of one step. State arrays 0 and 1 share a stream, 16 bits each; array 2 has
// the other.
struct RandomKeys {
  uint64_t high;  // of the first element's place in the flat space, by 2^32
  // [stream][0: of the elements up to the next multiple of 2^32, 1: beyond]
  RandomKey key[2][2];
};

inline RandomKeys RandomKeysOf(uint32_t seed, uint64_t flat) {
  const uint64_t high = flat >> 32;
  return {high,
          {{RandomKeyOf(seed, 0, high), RandomKeyOf(seed, 0, high + 1)},
           {RandomKeyOf(seed, 1, high), RandomKeyOf(seed, 1, high + 1)}}};
}

// RandomBits of random_bits.h for elements `low`, `low` + 1, ... of `key`, and
// of the next key behind 2^32.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RandomVector(D, RandomKey key,
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
  auto x = hn::Xor(index, first);
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)),
              hn::Set(du, kRandomMultiplier1));
  x = hn::Add(hn::Xor(x, hn::ShiftRight<15>(x)), second);
  x = hn::Mul(x, hn::Set(du, kRandomMultiplier2));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// The 16 random bits each of elements flat, flat + 1, ... of state array k.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RandomHalves(D d,
                                                         const RandomKeys& keys,
                                                         int k, uint64_t flat) {
  const hn::RebindToUnsigned<D> du;
  const auto& key = keys.key[k / 2];
  const bool is_beyond = flat >> 32 != keys.high;
  const auto bits = RandomVector(d, key[is_beyond ? 1 : 0], key[1],
                                 static_cast<uint32_t>(flat));
  return k % 2 == 0 ? hn::ShiftRight<16>(bits)
                    : hn::And(bits, hn::Set(du, 0xFFFF));
}

// `v` cut to bfloat16 after adding `random`, below 2^16, to what is cut off.
// A NaN is the canonical one, which stays.
template <class D, class V, class VU>
HWY_INLINE void StoreRounded(D d, V v, VU random, uint16_t* to) {
  const hn::RebindToUnsigned<D> du;
  const auto rounded = hn::Add(hn::BitCast(du, v), random);
  StoreHalves(d, hn::ShiftRight<16>(rounded), to);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
