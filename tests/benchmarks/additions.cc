#include "tests/benchmarks/additions.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

// The compiler makes vectors of these loops, for the best instruction set of
// the machine. ThreadSanitizer's run time is not yet up when the loader asks
// which one that is.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define OPTSTATE_BEST_TARGET \
  __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define OPTSTATE_BEST_TARGET
#endif
#define OPTSTATE_INLINE inline __attribute__((always_inline))

namespace optstate {
namespace {

constexpr size_t kBlock = 64;

template <typename Element, size_t kGradients>
using Gradients = std::array<const Element*, kGradients>;

OPTSTATE_INLINE float Added(float gradients, float master) {
  return gradients + master;
}

OPTSTATE_INLINE uint16_t Added(int gradients, float master) {
  return static_cast<uint16_t>(static_cast<uint32_t>(gradients) +
                               __builtin_bit_cast(uint32_t, master));
}

template <typename Element, size_t kGradients>
OPTSTATE_INLINE auto Sum(const Gradients<Element, kGradients>& gradients,
                         size_t i) {
  decltype(gradients[0][i] + Element{}) sum = gradients[0][i];
  for (size_t k = 1; k < kGradients; ++k) sum += gradients[k][i];
  return sum;
}

OPTSTATE_INLINE void AddZero(float* __restrict__ values, size_t numel) {
  for (size_t i = 0; i < numel; ++i) values[i] += 0.0f;
}

// A parameter of floats is its own master, in one place.
template <size_t kGradients>
OPTSTATE_INLINE void AddVectors(Gradients<float, kGradients> gradients,
                                float* __restrict__ parameter, float*,
                                float* __restrict__ exp_avg,
                                float* __restrict__ exp_avg_sq, size_t numel) {
#pragma GCC ivdep
  for (size_t i = 0; i < numel; ++i) {
    parameter[i] = Added(Sum(gradients, i), parameter[i]);
    exp_avg[i] += 0.0f;
    exp_avg_sq[i] += 0.0f;
  }
}

// Adding 0 is not to be left out: it makes 0 of -0.
template <size_t kGradients>
OPTSTATE_INLINE void AddVectors(Gradients<uint16_t, kGradients> gradients,
                                uint16_t* __restrict__ parameter,
                                float* __restrict__ master,
                                float* __restrict__ exp_avg,
                                float* __restrict__ exp_avg_sq, size_t numel) {
#pragma GCC ivdep
  for (size_t i = 0; i < numel; ++i) {
    const float value = master[i];
    parameter[i] = Added(Sum(gradients, i), value);
    master[i] = value + 0.0f;
    exp_avg[i] += 0.0f;
    exp_avg_sq[i] += 0.0f;
  }
}

template <size_t kGradients>
OPTSTATE_INLINE void AddParameters(Gradients<float, kGradients> gradients,
                                   float* __restrict__ parameter, float*,
                                   size_t begin, size_t end) {
#pragma GCC ivdep
  for (size_t i = begin; i < end; ++i) {
    parameter[i] = Added(Sum(gradients, i), parameter[i]);
  }
}

template <size_t kGradients>
OPTSTATE_INLINE void AddParameters(Gradients<uint16_t, kGradients> gradients,
                                   uint16_t* __restrict__ parameter,
                                   float* __restrict__ master, size_t begin,
                                   size_t end) {
#pragma GCC ivdep
  for (size_t i = begin; i < end; ++i) {
    parameter[i] = Added(Sum(gradients, i), master[i]);
  }
  AddZero(master + begin, end - begin);
}

template <typename Element, size_t kGradients>
OPTSTATE_INLINE void AddAll(const kernels::TileView& view,
                            AdditionsOrder order) {
  Gradients<Element, kGradients> gradients;
  for (size_t k = 0; k < kGradients; ++k) {
    gradients[k] = static_cast<const Element*>(view.gradients[k]);
  }
  auto* const parameter = static_cast<Element*>(view.parameter);
  auto* const master = static_cast<float*>(view.master);
  auto* const exp_avg = static_cast<float*>(view.state[0]);
  auto* const exp_avg_sq = static_cast<float*>(view.state[1]);
  if (order == AdditionsOrder::kVectors) {
    return AddVectors<kGradients>(gradients, parameter, master, exp_avg,
                                  exp_avg_sq, view.numel);
  }
  for (size_t begin = 0; begin < view.numel; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, view.numel);
    AddParameters<kGradients>(gradients, parameter, master, begin, end);
    AddZero(exp_avg + begin, end - begin);
    AddZero(exp_avg_sq + begin, end - begin);
  }
}

// Clones are made of functions, not of templates.
#define OPTSTATE_ADDITIONS(NAME, ELEMENT, GRADIENTS)                       \
  OPTSTATE_BEST_TARGET void NAME##GRADIENTS(const kernels::TileView& view, \
                                            AdditionsOrder order) {        \
    AddAll<ELEMENT, GRADIENTS>(view, order);                               \
  }
#define OPTSTATE_ADDITIONS_OF(NAME, ELEMENT) \
  OPTSTATE_ADDITIONS(NAME, ELEMENT, 1)       \
  OPTSTATE_ADDITIONS(NAME, ELEMENT, 2)       \
  OPTSTATE_ADDITIONS(NAME, ELEMENT, 4)       \
  OPTSTATE_ADDITIONS(NAME, ELEMENT, 8)

OPTSTATE_ADDITIONS_OF(AddFloats, float)
OPTSTATE_ADDITIONS_OF(AddHalves, uint16_t)

}  // namespace

void Additions(DType dtype, const kernels::TileView& view,
               AdditionsOrder order) {
  const bool floats = dtype == DType::kFloat32;
  switch (view.gradients.size()) {
    case 1:
      return floats ? AddFloats1(view, order) : AddHalves1(view, order);
    case 2:
      return floats ? AddFloats2(view, order) : AddHalves2(view, order);
    case 4:
      return floats ? AddFloats4(view, order) : AddHalves4(view, order);
    case 8:
      return floats ? AddFloats8(view, order) : AddHalves8(view, order);
  }
}

}  // namespace optstate
