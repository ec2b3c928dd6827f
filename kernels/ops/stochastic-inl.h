// bfloat16 state arrays, rounded stochastically. Per-target include.

#if defined(OPTSTATE_KERNELS_OPS_STOCHASTIC_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_OPS_STOCHASTIC_INL_H_
#undef OPTSTATE_KERNELS_OPS_STOCHASTIC_INL_H_
#else
#define OPTSTATE_KERNELS_OPS_STOCHASTIC_INL_H_
#endif

#include <cstdint>

#include "kernels/ops/float16-inl.h"
#include "kernels/random_bits.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

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
OPTSTATE_OP VU MixBits(DU du, VU index, VU first, VU second) {
  auto x = ops::Xor(index, first);
  x = ops::Mul(ops::Xor(x, ops::ShiftRight<16>(x)),
               ops::Set(du, kRandomMultiplier1));
  x = ops::Add(ops::Xor(x, ops::ShiftRight<15>(x)), second);
  x = ops::Mul(x, ops::Set(du, kRandomMultiplier2));
  return ops::Xor(x, ops::ShiftRight<16>(x));
}

// Returns the bits of elements `low`, `low` + 1, ... of `key`, and of the next
// key behind 2^32. Seldom called; kept out of the loop's code.
template <class D>
OPTSTATE_SELDOM_OP ops::Vec<ops::RebindToUnsigned<D>> RandomAcross(
    D, RandomKey key, RandomKey next_key, uint32_t low) {
  const ops::RebindToUnsigned<D> du;
  const ops::RebindToSigned<D> di;
  const auto index = ops::Iota(du, low);
  // Lanes behind the 2^32nd element belong to the next key.
  const auto sign = ops::Set(du, 0x80000000u);
  const auto has_wrapped = ops::RebindMask(
      du, ops::Lt(ops::BitCast(di, ops::Xor(index, sign)),
                  ops::BitCast(di, ops::Xor(ops::Set(du, low), sign))));
  const auto first = ops::IfThenElse(has_wrapped, ops::Set(du, next_key.first),
                                     ops::Set(du, key.first));
  const auto second = ops::IfThenElse(
      has_wrapped, ops::Set(du, next_key.second), ops::Set(du, key.second));
  return MixBits(du, index, first, second);
}

// Returns the 32 random bits each of elements flat, flat + 1, ... in the
// stream.
template <class D>
OPTSTATE_OP ops::Vec<ops::RebindToUnsigned<D>> RandomVector(
    D d, const RandomKeys& keys, int stream, uint64_t flat) {
  const ops::RebindToUnsigned<D> du;
  const auto& both = keys.key[stream];
  const RandomKey key = both[flat >> 32 != keys.high ? 1 : 0];
  const auto low = static_cast<uint32_t>(flat);
  if (OPTSTATE_UNLIKELY(low > UINT32_MAX - (ops::Lanes(d) - 1))) {
    return RandomAcross(d, key, both[1], low);
  }
  return MixBits(du, ops::Iota(du, low), ops::Set(du, key.first),
                 ops::Set(du, key.second));
}

// Returns the stream of state array k.
constexpr int RandomStreamOf(int k) { return k / 2; }

// Stores `v` cut to bfloat16, after adding, to the bits that are cut off, the
// 16 bits of the stream that are state array k's. A NaN is the canonical one,
// which stays.
template <class D, class V, class VU>
OPTSTATE_OP void StoreRounded(D d, V v, VU bits, int k, uint16_t* to) {
  const ops::RebindToUnsigned<D> du;
  const auto random = k % 2 == 0 ? ops::ShiftRight<16>(bits)
                                 : ops::And(bits, ops::Set(du, 0xFFFF));
  const auto rounded = ops::Add(ops::BitCast(du, v), random);
  StoreHalves(d, ops::ShiftRight<16>(rounded), to);
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
