#ifndef OPTSTATE_KERNELS_SCALAR_VECTOR_UPDATE_H_
#define OPTSTATE_KERNELS_SCALAR_VECTOR_UPDATE_H_

// The update of four elements by one thread, which loads and stores them at
// once: 16 bytes of floats, 8 of 16-bit values. A GPU's memory is fully used by
// such accesses alone. The arithmetic is that of element_update.h, lane by
// lane.

#include <cstddef>
#include <cstdint>

#include "kernels/scalar/element_update.h"

namespace optstate::kernels::scalar {

inline constexpr uint64_t kVectorElements = 4;

// One access of a device.
template <class T>
struct alignas(kVectorElements * sizeof(T)) VectorOf {
  T lane[kVectorElements];
};

// One access of memory that is aligned to it. On a device it is written as an
// instruction: nvcc makes four stores of a vector's members wherever it cannot
// tell where its alignment comes from.
OPTSTATE_OP VectorOf<float> LoadVector(const float* from) {
#ifdef __CUDA_ARCH__
  VectorOf<float> v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.lane[0]), "=f"(v.lane[1]), "=f"(v.lane[2]),
                 "=f"(v.lane[3])
               : "l"(__cvta_generic_to_global(from)));
  return v;
#else
  return *reinterpret_cast<const VectorOf<float>*>(from);
#endif
}
OPTSTATE_OP VectorOf<uint16_t> LoadVector(const uint16_t* from) {
#ifdef __CUDA_ARCH__
  VectorOf<uint16_t> v;
  asm volatile("ld.global.v4.u16 {%0, %1, %2, %3}, [%4];"
               : "=h"(v.lane[0]), "=h"(v.lane[1]), "=h"(v.lane[2]),
                 "=h"(v.lane[3])
               : "l"(__cvta_generic_to_global(from)));
  return v;
#else
  return *reinterpret_cast<const VectorOf<uint16_t>*>(from);
#endif
}
OPTSTATE_OP void StoreVector(const VectorOf<float>& v, float* to) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(to)),
               "f"(v.lane[0]), "f"(v.lane[1]), "f"(v.lane[2]), "f"(v.lane[3]));
#else
  *reinterpret_cast<VectorOf<float>*>(to) = v;
#endif
}
OPTSTATE_OP void StoreVector(const VectorOf<uint16_t>& v, uint16_t* to) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.u16 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(to)),
               "h"(v.lane[0]), "h"(v.lane[1]), "h"(v.lane[2]), "h"(v.lane[3]));
#else
  *reinterpret_cast<VectorOf<uint16_t>*>(to) = v;
#endif
}

// The floats of the lanes.
using Lanes = float[kVectorElements];

template <DType kDType>
OPTSTATE_OP void LoadLanes(const void* from, size_t i, Lanes& to) {
  using Element = StorageOf<kDType>;
  const auto vector = LoadVector(static_cast<const Element*>(from) + i);
  for (uint64_t k = 0; k < kVectorElements; ++k) {
    to[k] = LoadFloats<kDType>(ops::FloatTag(), vector.lane + k);
  }
}

template <DType kDType>
OPTSTATE_OP void StoreLanes(const Lanes& from, void* to, size_t i) {
  VectorOf<StorageOf<kDType>> vector;
  for (uint64_t k = 0; k < kVectorElements; ++k) {
    StoreFloats<kDType>(ops::FloatTag(), from[k], vector.lane + k);
  }
  StoreVector(vector, static_cast<StorageOf<kDType>*>(to) + i);
}

template <DType kDType>
OPTSTATE_OP void SumLanes(const GradientElements& gradient, size_t i,
                          Lanes& sum) {
  LoadLanes<kDType>(gradient.gradients[0], i, sum);
  for (size_t g = 1; g < gradient.count; ++g) {
    Lanes addend;
    LoadLanes<kDType>(gradient.gradients[g], i, addend);
    for (uint64_t k = 0; k < kVectorElements; ++k) {
      sum[k] = ops::Add(sum[k], addend[k]);
    }
  }
}

OPTSTATE_OP void LoadGradients(const GradientElements& gradient, size_t i,
                               Lanes& sum) {
  switch (gradient.dtype) {
    case DType::kFloat32:
      break;
    case DType::kBFloat16:
      return SumLanes<DType::kBFloat16>(gradient, gradient.begin + i, sum);
    case DType::kFloat16:
      return SumLanes<DType::kFloat16>(gradient, gradient.begin + i, sum);
  }
  SumLanes<DType::kFloat32>(gradient, gradient.begin + i, sum);
}

OPTSTATE_OP void LoadMasters(const TileElements& tile, size_t i,
                             Lanes& master) {
  if (tile.master_format != MasterFormat::kSplit) {
    return LoadLanes<DType::kFloat32>(tile.master, i, master);
  }
  const auto high =
      LoadVector(static_cast<const uint16_t*>(tile.parameter) + i);
  const auto low = LoadVector(static_cast<const uint16_t*>(tile.master) + i);
  for (uint64_t k = 0; k < kVectorElements; ++k) {
    master[k] = LoadSplit(ops::FloatTag(), high.lane + k, low.lane + k);
  }
}

OPTSTATE_OP void StoreMasters(const TileElements& tile, size_t i,
                              const Lanes& master) {
  if (tile.master_format == MasterFormat::kSplit) {
    VectorOf<uint16_t> high;
    VectorOf<uint16_t> low;
    for (uint64_t k = 0; k < kVectorElements; ++k) {
      StoreSplit(ops::FloatTag(), master[k], high.lane + k, low.lane + k);
    }
    StoreVector(high, static_cast<uint16_t*>(tile.parameter) + i);
    StoreVector(low, static_cast<uint16_t*>(tile.master) + i);
    return;
  }
  StoreLanes<DType::kFloat32>(master, tile.master, i);
  if (tile.parameter_dtype == DType::kBFloat16) {
    StoreLanes<DType::kBFloat16>(master, tile.parameter, i);
  } else if (tile.parameter_dtype == DType::kFloat16) {
    StoreLanes<DType::kFloat16>(master, tile.parameter, i);
  }
}

OPTSTATE_OP void LoadStates(const TileElements& tile, int array, size_t i,
                            Lanes& state) {
  if (tile.state_format == StateFormat::kFloat32) {
    return LoadLanes<DType::kFloat32>(tile.state[array], i, state);
  }
  LoadLanes<DType::kBFloat16>(tile.state[array], i, state);
}

// The random bits of the lanes in one stream.
using LaneBits = uint32_t[kVectorElements];

OPTSTATE_OP void DrawLanes(const TileElements& tile, int stream, size_t i,
                           LaneBits& bits) {
  const ops::FloatTag d;
  const uint64_t flat = tile.flat + i;
  if (OPTSTATE_UNLIKELY(flat >> 32 != (flat + kVectorElements - 1) >> 32)) {
    for (uint64_t k = 0; k < kVectorElements; ++k) {
      bits[k] = RandomVector(d, tile.random, stream, flat + k);
    }
    return;
  }
  // All lanes have one key.
  const RandomKey key =
      tile.random.key[stream][flat >> 32 != tile.random.high ? 1 : 0];
  const auto low = static_cast<uint32_t>(flat);
  for (uint64_t k = 0; k < kVectorElements; ++k) {
    bits[k] = MixBits(ops::RebindToUnsigned<ops::FloatTag>(),
                      low + static_cast<uint32_t>(k), key.first, key.second);
  }
}

OPTSTATE_OP void StoreHalfStates(const TileElements& tile, int array, size_t i,
                                 const Lanes& state, const LaneBits& bits) {
  const ops::FloatTag d;
  VectorOf<uint16_t> halves;
  for (uint64_t k = 0; k < kVectorElements; ++k) {
    StoreRounded(d, state[k], bits[k], array, halves.lane + k);
  }
  StoreVector(halves, static_cast<uint16_t*>(tile.state[array]) + i);
}

// Stores all states of a rule. Random bits are most of what a store of halves
// computes, so they are drawn once for the two arrays of a stream.
template <class Rule>
OPTSTATE_OP void StoreStates(const TileElements& tile, size_t i,
                             const Lanes& state0, const Lanes& state1,
                             const Lanes& state2) {
  if (tile.state_format == StateFormat::kFloat32) {
    if constexpr (HasState<Rule>(0)) {
      StoreLanes<DType::kFloat32>(state0, tile.state[0], i);
    }
    if constexpr (HasState<Rule>(1)) {
      StoreLanes<DType::kFloat32>(state1, tile.state[1], i);
    }
    if constexpr (HasState<Rule>(2)) {
      StoreLanes<DType::kFloat32>(state2, tile.state[2], i);
    }
    return;
  }
  if constexpr (HasState<Rule>(0) || HasState<Rule>(1)) {
    static_assert(RandomStreamOf(0) == RandomStreamOf(1));
    LaneBits bits;
    DrawLanes(tile, RandomStreamOf(0), i, bits);
    if constexpr (HasState<Rule>(0)) StoreHalfStates(tile, 0, i, state0, bits);
    if constexpr (HasState<Rule>(1)) StoreHalfStates(tile, 1, i, state1, bits);
  }
  if constexpr (HasState<Rule>(2)) {
    LaneBits bits;
    DrawLanes(tile, RandomStreamOf(2), i, bits);
    StoreHalfStates(tile, 2, i, state2, bits);
  }
}

OPTSTATE_OP bool IsAligned(const void* array, uint64_t bytes) {
  return reinterpret_cast<uint64_t>(array) % bytes == 0;
}

// Returns whether elements from `begin` on may be accessed as vectors: each
// array is aligned to them. States are of float or bfloat16.
template <class Rule>
OPTSTATE_OP bool HasVectors(const TileElements& tile, uint64_t begin) {
  constexpr uint64_t kFloats = sizeof(VectorOf<float>);
  constexpr uint64_t kHalves = sizeof(VectorOf<uint16_t>);
  bool is_aligned = begin % kVectorElements == 0;
  is_aligned &=
      IsAligned(tile.parameter,
                tile.parameter_dtype == DType::kFloat32 ? kFloats : kHalves);
  is_aligned &=
      IsAligned(tile.master,
                tile.master_format == MasterFormat::kSplit ? kHalves : kFloats);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!HasState<Rule>(k)) continue;
    is_aligned &= IsAligned(
        tile.state[k],
        tile.state_format == StateFormat::kFloat32 ? kFloats : kHalves);
  }
  const GradientElements& gradient = tile.gradient;
  const uint64_t bytes = gradient.dtype == DType::kFloat32 ? kFloats : kHalves;
  is_aligned &= gradient.begin % kVectorElements == 0;
  for (size_t g = 0; g < gradient.count; ++g) {
    is_aligned &= IsAligned(gradient.gradients[g], bytes);
  }
  return is_aligned;
}

// Updates elements [i, i + kVectorElements), where HasVectors() holds and i is
// a multiple of kVectorElements, as UpdateElement does each.
template <class Rule>
OPTSTATE_OP void UpdateVector(const GradientScale& scale, const Rule& rule,
                              const TileElements& tile, size_t i) {
  Lanes gradient, master;
  Lanes state0 = {}, state1 = {}, state2 = {};
  LoadMasters(tile, i, master);
  if constexpr (HasState<Rule>(0)) LoadStates(tile, 0, i, state0);
  if constexpr (HasState<Rule>(1)) LoadStates(tile, 1, i, state1);
  if constexpr (HasState<Rule>(2)) LoadStates(tile, 2, i, state2);
  LoadGradients(tile.gradient, i, gradient);
  for (uint64_t k = 0; k < kVectorElements; ++k) {
    UpdateLoaded<false>(ops::FloatTag(), scale, rule, gradient[k], master[k],
                        state0[k], state1[k], state2[k]);
  }
  StoreMasters(tile, i, master);
  StoreStates<Rule>(tile, i, state0, state1, state2);
}

}  // namespace optstate::kernels::scalar

#endif  // OPTSTATE_KERNELS_SCALAR_VECTOR_UPDATE_H_
