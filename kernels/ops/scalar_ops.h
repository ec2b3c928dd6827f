#ifndef OPTSTATE_KERNELS_OPS_SCALAR_OPS_H_
#define OPTSTATE_KERNELS_OPS_SCALAR_OPS_H_

// The operations of ops-inl.h on one float, in C++ that a CUDA compiler reads
// too. A file that includes this before every -inl.h gets their scalar form.

#ifdef OPTSTATE_OPS_NAMESPACE
#error "include kernels/ops/scalar_ops.h before any -inl.h"
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/ops/host_device.h"

#define OPTSTATE_OPS_NAMESPACE scalar
#define OPTSTATE_BEFORE_OPS() static_assert(true, "")
#define OPTSTATE_AFTER_OPS() static_assert(true, "")
#define OPTSTATE_OP OPTSTATE_HOST_DEVICE inline
#define OPTSTATE_SELDOM_OP OPTSTATE_HOST_DEVICE inline
#define OPTSTATE_UNLIKELY(condition) (condition)

namespace optstate::kernels::scalar::ops {

// A vector of one lane is the lane.
template <class T>
struct Tag {
  using Lane = T;
};
using FloatTag = Tag<float>;
using OneTag = FloatTag;

template <class D>
using Vec = typename D::Lane;
template <class T, class D>
using Rebind = Tag<T>;
// Integers as wide as the lane.
template <class D>
using RebindToUnsigned =
    Tag<std::conditional_t<sizeof(typename D::Lane) == 2, uint16_t, uint32_t>>;
template <class D>
using RebindToSigned =
    Tag<std::conditional_t<sizeof(typename D::Lane) == 2, int16_t, int32_t>>;

template <class D>
OPTSTATE_HOST_DEVICE constexpr size_t Lanes(D) {
  return 1;
}

// Load and store; conversions.

template <class T>
OPTSTATE_HOST_DEVICE inline T LoadU(Tag<T>, const T* from) {
  return *from;
}
template <class T>
OPTSTATE_HOST_DEVICE inline void StoreU(T v, Tag<T>, T* to) {
  *to = v;
}
template <class T>
OPTSTATE_HOST_DEVICE inline T Set(Tag<T>, std::type_identity_t<T> value) {
  return value;
}
template <class T>
OPTSTATE_HOST_DEVICE inline T GetLane(T v) {
  return v;
}
template <class T>
OPTSTATE_HOST_DEVICE inline T Zero(Tag<T>) {
  return T{};
}
template <class T>
OPTSTATE_HOST_DEVICE inline T Iota(Tag<T>, std::type_identity_t<T> first) {
  return first;
}
template <class To, class From>
OPTSTATE_HOST_DEVICE inline To BitCast(Tag<To>, From v) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, v);
}
template <class To, class From>
OPTSTATE_HOST_DEVICE inline To PromoteTo(Tag<To>, From v) {
  static_assert(sizeof(To) > sizeof(From));
  return static_cast<To>(v);
}
template <class To, class From>
OPTSTATE_HOST_DEVICE inline To TruncateTo(Tag<To>, From v) {
  static_assert(std::is_unsigned_v<To> && std::is_unsigned_v<From>);
  return static_cast<To>(v);
}
OPTSTATE_HOST_DEVICE inline float ConvertTo(Tag<float>, int32_t v) {
  return static_cast<float>(v);
}
template <class Byte>
OPTSTATE_HOST_DEVICE inline void StoreLowBytes(Tag<Byte>, int32_t v, Byte* to) {
  constexpr int32_t kMin = std::is_signed_v<Byte> ? -128 : 0;
  constexpr int32_t kMax = std::is_signed_v<Byte> ? 127 : 255;
  *to = static_cast<Byte>(v < kMin ? kMin : v > kMax ? kMax : v);
}

// Arithmetic. The compiler never fuses CUDA's intrinsics that round to nearest,
// whatever its flags.

#ifdef __CUDA_ARCH__
#define OPTSTATE_ROUNDED(DEVICE, HOST) return DEVICE
#else
#define OPTSTATE_ROUNDED(DEVICE, HOST) return HOST
#endif

OPTSTATE_HOST_DEVICE inline float Add(float a, float b) {
  OPTSTATE_ROUNDED(__fadd_rn(a, b), a + b);
}
OPTSTATE_HOST_DEVICE inline float Sub(float a, float b) {
  OPTSTATE_ROUNDED(__fsub_rn(a, b), a - b);
}
OPTSTATE_HOST_DEVICE inline float Mul(float a, float b) {
  OPTSTATE_ROUNDED(__fmul_rn(a, b), a * b);
}
OPTSTATE_HOST_DEVICE inline float Div(float a, float b) {
  OPTSTATE_ROUNDED(__fdiv_rn(a, b), a / b);
}
OPTSTATE_HOST_DEVICE inline float Sqrt(float a) {
  OPTSTATE_ROUNDED(__fsqrt_rn(a), __builtin_sqrtf(a));
}
OPTSTATE_HOST_DEVICE inline double Add(double a, double b) {
  OPTSTATE_ROUNDED(__dadd_rn(a, b), a + b);
}
OPTSTATE_HOST_DEVICE inline double Sub(double a, double b) {
  OPTSTATE_ROUNDED(__dsub_rn(a, b), a - b);
}
OPTSTATE_HOST_DEVICE inline double Mul(double a, double b) {
  OPTSTATE_ROUNDED(__dmul_rn(a, b), a * b);
}

#undef OPTSTATE_ROUNDED

// GCC on a machine that can would fuse a product, unless told
// -ffp-contract=off: see vector_ops-inl.h.
template <class T>
OPTSTATE_HOST_DEVICE inline T Product(T a, T b) {
  T product = Mul(a, b);
#if defined(__CUDA_ARCH__)
#elif defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__GNUC__) && !defined(__clang__) && defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

OPTSTATE_HOST_DEVICE inline double ScalarProduct(double a, double b) {
  return Product(a, b);
}

// Integers wrap, as Highway's do.
OPTSTATE_HOST_DEVICE inline uint32_t Add(uint32_t a, uint32_t b) {
  return a + b;
}
OPTSTATE_HOST_DEVICE inline uint32_t Mul(uint32_t a, uint32_t b) {
  return a * b;
}
OPTSTATE_HOST_DEVICE inline int32_t Add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) +
                              static_cast<uint32_t>(b));
}
OPTSTATE_HOST_DEVICE inline int32_t Sub(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) -
                              static_cast<uint32_t>(b));
}
OPTSTATE_HOST_DEVICE inline int32_t MulHigh16(Tag<int32_t>, int32_t x,
                                              uint16_t factor) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) * factor >> 16);
}
template <class T>
OPTSTATE_HOST_DEVICE inline T Min(T a, T b) {
  return a < b ? a : b;
}

// Bits, of integers and, where a float is named, of masks.

template <class T>
OPTSTATE_HOST_DEVICE inline T And(T a, T b) {
  return static_cast<T>(a & b);
}
template <class T>
OPTSTATE_HOST_DEVICE inline T Or(T a, T b) {
  return static_cast<T>(a | b);
}
template <class T>
OPTSTATE_HOST_DEVICE inline T Xor(T a, T b) {
  return static_cast<T>(a ^ b);
}
template <int kBits, class T>
OPTSTATE_HOST_DEVICE inline T ShiftLeft(T v) {
  return static_cast<T>(static_cast<uint32_t>(v) << kBits);
}
// Shifting a signed integer repeats its sign.
template <int kBits, class T>
OPTSTATE_HOST_DEVICE inline T ShiftRight(T v) {
  return static_cast<T>(v >> kBits);
}

// Signs are bits: of a NaN too, which arithmetic would leave open.

inline constexpr uint32_t kSignBit = 0x80000000;

OPTSTATE_HOST_DEVICE inline uint32_t BitsOf(float v) {
  return BitCast(Tag<uint32_t>(), v);
}
OPTSTATE_HOST_DEVICE inline float FloatOf(uint32_t bits) {
  return BitCast(FloatTag(), bits);
}
OPTSTATE_HOST_DEVICE inline float Abs(float v) {
  return FloatOf(BitsOf(v) & ~kSignBit);
}
OPTSTATE_HOST_DEVICE inline double Abs(double v) {
  return __builtin_bit_cast(
      double, __builtin_bit_cast(uint64_t, v) & ~(uint64_t{kSignBit} << 32));
}
OPTSTATE_HOST_DEVICE inline float Neg(float v) {
  return FloatOf(BitsOf(v) ^ kSignBit);
}
OPTSTATE_HOST_DEVICE inline float CopySign(float magnitude, float sign) {
  return FloatOf((BitsOf(magnitude) & ~kSignBit) | (BitsOf(sign) & kSignBit));
}
OPTSTATE_HOST_DEVICE inline float CopySignToAbs(float magnitude, float sign) {
  return CopySign(magnitude, sign);
}

// Comparisons and choices. A mask is a bool.

template <class T>
OPTSTATE_HOST_DEVICE inline bool Eq(T a, T b) {
  return a == b;
}
template <class T>
OPTSTATE_HOST_DEVICE inline bool Lt(T a, T b) {
  return a < b;
}
template <class T>
OPTSTATE_HOST_DEVICE inline bool Gt(T a, T b) {
  return a > b;
}
template <class T>
OPTSTATE_HOST_DEVICE inline bool Ge(T a, T b) {
  return a >= b;
}
template <class T>
OPTSTATE_HOST_DEVICE inline bool IsNaN(T v) {
  return v != v;  // NOLINT(misc-redundant-expression)
}
template <class T>
OPTSTATE_HOST_DEVICE inline T IfThenElse(bool mask, T yes, T no) {
  return mask ? yes : no;
}
template <class T>
OPTSTATE_HOST_DEVICE inline T IfThenElseZero(bool mask, T yes) {
  return mask ? yes : T{};
}
template <class T>
OPTSTATE_HOST_DEVICE inline T IfThenZeroElse(bool mask, T no) {
  return mask ? T{} : no;
}
template <class D>
OPTSTATE_HOST_DEVICE inline bool RebindMask(D, bool mask) {
  return mask;
}
// A true lane is -1.
OPTSTATE_HOST_DEVICE inline int32_t VecFromMask(Tag<int32_t>, bool mask) {
  return mask ? -1 : 0;
}

OPTSTATE_HOST_DEVICE inline float Lookup8(FloatTag, const float* table,
                                          int32_t index) {
  return table[index & 7];
}

}  // namespace optstate::kernels::scalar::ops

#endif  // OPTSTATE_KERNELS_OPS_SCALAR_OPS_H_
