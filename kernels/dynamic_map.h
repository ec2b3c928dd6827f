#ifndef OPTSTATE_KERNELS_DYNAMIC_MAP_H_
#define OPTSTATE_KERNELS_DYNAMIC_MAP_H_

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace optstate::kernels {

// The dynamic map of bitsandbytes (create_dynamic_map): 256 values in [-1, 1]
// (or [0, 1], unsigned), among them 0 and 1. Between 0 and 1 there are seven
// decades, each cut into twice as many equal parts as the one below it, with
// the middles of the parts for values: decade 10^-k, ..., 10^-(k-1) has
//   10^-k * (1 + 9 * (q + 1/2) / 2^e),  q = 0, ..., 2^e - 1.
//
// 0 is at place 0, the others are at places 1 to 127 or 254, and 1 is behind
// them. Number the values so that the one above has number 2^e + q: signed
// these are the places, unsigned the places plus 1. The float of a number then
// has the exponent e and the mantissa 1 + q / 2^e, and its value is
//   start[e] + step[e] * (mantissa - 1).
//
// Codes are such that a byte of 0 means 0, so that zeroed memory is a state of
// zeros: unsigned the place, signed an int8_t, the place of negative values and
// minus the place of positive ones (1, at place 128, has no opposite).
// bitsandbytes' codes are the same, unsigned, and 127 minus ours, signed.
struct DynamicMap {
  // Eight values, repeated for vectors of 16; their index is (e + 7) % 8.
  float start[16];
  float step[16];
  // The values of each decade. A decade begins with the magnitudes that lie
  // nearest to its first value: magnitude x lies nearest to place slope * x +
  // offset, rounded, but at most to the last place. 1 is a decade of its own,
  // the eighth.
  float next_begin[16];  // of the decade above; infinity
  float slope[16];
  float offset[16];
  float last[16];
  float begin;    // the first magnitude whose place is not 0
  int32_t shift;  // a value's number less its place
  // The decade of x, with begin <= x <= 1, is the remainder by 8 of
  //   (upper + decade_offset) * kDecadeFactor / 2^16,
  // where `upper` are the upper 16 bits of x as a float, or the next decade.
  int32_t decade_offset;
};

// The upper 16 bits are nearly a logarithm, up to 0.03 below the one to base
// 10. A decade begins in the middle between two values, 1.9 to 1.02 times a
// power of ten: the offsets leave 0.08 and 0.03 of a decade on either side
// (dynamic_map_test).
inline constexpr uint16_t kDecadeFactor = 154;  // log10(2) * 2^9, nearly

constexpr DynamicMap MakeDynamicMap(bool is_signed) {
  DynamicMap map = {};
  map.shift = is_signed ? 0 : 1;
  map.decade_offset = is_signed ? 190 : 270;
  int exponent = is_signed ? 0 : 1;
  double parts = is_signed ? 1 : 2;
  double decade = 1e-7;  // where the decade begins
  double below = 0;      // the value before the decade's first
  for (int k = 0; k < 8; ++k) {
    const bool is_one = k == 7;
    const double step = is_one ? 0 : 9 * decade / parts;
    const double first = is_one ? 1 : decade + step / 2;
    const auto begin = static_cast<float>((below + first) / 2);
    if (k == 0) map.begin = begin;
    for (int copy : {0, 8}) {
      const int e = (exponent + 7) % 8 + copy;
      map.start[e] = static_cast<float>(first);
      map.step[e] = static_cast<float>(is_one ? 0 : 9 * decade);
      if (k > 0) map.next_begin[k - 1 + copy] = begin;
      if (is_one) {
        map.next_begin[k + copy] = std::numeric_limits<float>::infinity();
        map.last[k + copy] = map.offset[k + copy] =
            static_cast<float>(parts - map.shift);
        continue;
      }
      map.slope[k + copy] = static_cast<float>(1 / step);
      map.offset[k + copy] =
          static_cast<float>(parts * 8 / 9 - 0.5 - map.shift);
      map.last[k + copy] = static_cast<float>(2 * parts - 1 - map.shift);
    }
    below = first + (parts - 1) * step;
    parts *= 2;
    decade *= 10;
    ++exponent;
  }
  return map;
}

inline constexpr DynamicMap kSignedMap = MakeDynamicMap(true);
inline constexpr DynamicMap kUnsignedMap = MakeDynamicMap(false);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_DYNAMIC_MAP_H_
