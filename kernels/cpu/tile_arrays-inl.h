// The arrays of a TileView with their element types. Per-target include.
//
// The traversal (update-inl.h) sees elements as floats and leaves it to one of
// these classes how they lie in memory:
//   FixedArrays   dtypes known to the compiler: fastest, a loop for each pair
//   SumArrays     FixedArrays of several gradients, whose dtype is asked for
//   AnyArrays     AnyElements, which ask for all at each vector, a branch that
//                 the CPU predicts: one loop, so that many rules stay small

#if defined(OPTSTATE_KERNELS_CPU_TILE_ARRAYS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_TILE_ARRAYS_INL_H_
#undef OPTSTATE_KERNELS_CPU_TILE_ARRAYS_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_TILE_ARRAYS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/gradient_sum-inl.h"
#include "kernels/cpu/half_pairs-inl.h"
#include "kernels/ops/float16-inl.h"
#include "kernels/ops/split_master-inl.h"
#include "kernels/ops/stochastic-inl.h"
#include "kernels/rules/elements-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The random bits of a vector whose state is not rounded at random: none.
struct NoStateBits {};

inline void* Advance(void* array, size_t bytes) {
  return array == nullptr ? nullptr : static_cast<uint8_t*>(array) + bytes;
}

template <DType kGradient, DType kParameter, MasterFormat kMaster>
struct FixedArrays : TileArrays {
  using Gradient = StorageOf<kGradient>;
  using Parameter = StorageOf<kParameter>;

  static constexpr bool kHasFloatState = true;
  // Says whether gradients are best loaded by pairs of vectors. A single
  // gradient is not: undo then costs bfloat16 two hundredths more in the
  // caches.
  static constexpr bool kSums = false;
  // These arrays with one gradient, of floats.
  using OfFloats = FixedArrays<DType::kFloat32, kParameter, kMaster>;
  OfFloats WithGradient(const void* const* floats) const {
    return {static_cast<const TileArrays&>(*this), *floats};
  }

  const void* gradient;

  static constexpr size_t GradientBytes() { return sizeof(Gradient); }
  static constexpr size_t ParameterBytes() { return sizeof(Parameter); }
  static constexpr size_t MasterBytes() { return BytesOfMaster(kMaster); }
  static constexpr size_t StateBytes() { return sizeof(float); }
  static constexpr bool ReadsParameter() {
    return kMaster == MasterFormat::kSplit;
  }
  static constexpr bool HasOwnParameter() {
    return kParameter != DType::kFloat32;
  }

  void MoveFlat(size_t) {}  // the flat position plays no role
  void MoveGradient(size_t by) {
    gradient = static_cast<const Gradient*>(gradient) + by;
  }
  void GatherGradient(size_t begin, size_t count, float* out) const {
    GradientSum{{&gradient, 1, kGradient, 0}}.Gather(begin, count, out);
  }

  template <class D>
  HWY_INLINE hn::Vec<D> LoadGradient(D d, size_t i) const {
    return LoadFloats<kGradient>(d, static_cast<const Gradient*>(gradient) + i);
  }
  template <class D, class V>
  HWY_INLINE void LoadGradientPair(D d, size_t i, V& first, V& second) const {
    first = LoadGradient(d, i);
    second = LoadGradient(d, i + hn::Lanes(d));
  }
  HWY_INLINE void PrefetchGradient(size_t i) const {
    hwy::Prefetch(static_cast<const Gradient*>(gradient) + i);
  }

  template <class D>
  HWY_INLINE hn::Vec<D> LoadMaster(D d, size_t i) const {
    if constexpr (kMaster == MasterFormat::kSplit) {
      return LoadSplit(d, static_cast<const uint16_t*>(parameter) + i,
                       static_cast<const uint16_t*>(master) + i);
    } else {
      return hn::LoadU(d, static_cast<const float*>(master) + i);
    }
  }

  template <class D>
  HWY_INLINE hn::Vec<D> LoadState(D d, int k, size_t i) const {
    return hn::LoadU(d, static_cast<const float*>(state[k]) + i);
  }

  template <class D>
  HWY_INLINE NoStateBits StateBits(D, size_t) const {
    return {};
  }
  template <class D, class V>
  HWY_INLINE void StoreState(D d, V v, int k, size_t i, NoStateBits) const {
    hn::StoreU(v, d, static_cast<float*>(state[k]) + i);
  }

  // Stores the master and the parameter with it. kPlain: no master is NaN.
  template <bool kPlain = false, class D, class V>
  HWY_INLINE void StoreMaster(D d, V v, size_t i) const {
    if constexpr (kMaster == MasterFormat::kSplit) {
      StoreSplit(d, v, static_cast<uint16_t*>(parameter) + i,
                 static_cast<uint16_t*>(master) + i);
    } else {
      hn::StoreU(v, d, static_cast<float*>(master) + i);
      if constexpr (kParameter != DType::kFloat32) {
        StoreFloats<kParameter, kPlain>(d, v,
                                        static_cast<Parameter*>(parameter) + i);
      }
    }
  }

  // Stores two vectors; none is NaN.
  template <class D, class V>
  HWY_INLINE void StorePlainMasters(D d, V first, V second, size_t i) const {
    if constexpr (kMaster == MasterFormat::kFloat32 &&
                  kParameter == DType::kBFloat16) {
      auto* const to = static_cast<float*>(master) + i;
      hn::StoreU(first, d, to);
      hn::StoreU(second, d, to + hn::Lanes(d));
      StoreBFloat16Pair(d, first, second,
                        static_cast<Parameter*>(parameter) + i);
    } else {
      StoreMaster<true>(d, first, i);
      StoreMaster<true>(d, second, i + hn::Lanes(d));
    }
  }
};

// FixedArrays of several gradients.
template <DType kParameter, MasterFormat kMaster>
struct SumArrays : FixedArrays<DType::kFloat32, kParameter, kMaster> {
  static constexpr bool kSums = true;
  GradientSum sum;

  // The bytes of a gradient that is prefetched.
  static constexpr size_t GradientBytes() { return sizeof(float); }
  void MoveGradient(size_t by) { sum.begin += by; }
  void GatherGradient(size_t begin, size_t count, float* out) const {
    sum.Gather(begin, count, out);
  }

  template <class D>
  HWY_INLINE hn::Vec<D> LoadGradient(D d, size_t i) const {
    return sum.Load(d, i);
  }
  template <class D, class V>
  HWY_INLINE void LoadGradientPair(D d, size_t i, V& first, V& second) const {
    sum.LoadPair(d, i, first, second);
  }
  HWY_INLINE void PrefetchGradient(size_t i) const { sum.Prefetch(i); }
};

struct AnyArrays : AnyElements {
  static constexpr bool kHasFloatState = false;
  static constexpr bool kSums = true;

  GradientSum sum;

  // The bytes of a gradient that is prefetched.
  static constexpr size_t GradientBytes() { return sizeof(float); }
  size_t ParameterBytes() const { return SizeInBytes(parameter_dtype); }
  size_t MasterBytes() const { return BytesOfMaster(master_format); }
  bool ReadsParameter() const { return master_format == MasterFormat::kSplit; }
  bool HasOwnParameter() const { return parameter_dtype != DType::kFloat32; }
  size_t StateBytes() const {
    return state_format == StateFormat::kFloat32 ? sizeof(float)
                                                 : sizeof(uint16_t);
  }

  void MoveFlat(size_t by) { flat += by; }
  void MoveGradient(size_t by) { sum.begin += by; }
  void GatherGradient(size_t begin, size_t count, float* out) const {
    sum.Gather(begin, count, out);
  }
  AnyArrays WithGradient(const void* const* floats) const {
    AnyArrays arrays = *this;
    arrays.sum = {{floats, 1, DType::kFloat32, 0}};
    return arrays;
  }

  template <class D>
  HWY_INLINE hn::Vec<D> LoadGradient(D d, size_t i) const {
    return sum.Load(d, i);
  }
  template <class D, class V>
  HWY_INLINE void LoadGradientPair(D d, size_t i, V& first, V& second) const {
    sum.LoadPair(d, i, first, second);
  }
  HWY_INLINE void PrefetchGradient(size_t i) const { sum.Prefetch(i); }

  template <class D, class V>
  HWY_INLINE void StorePlainMasters(D d, V first, V second, size_t i) const {
    StoreMaster<true>(d, first, i);
    StoreMaster<true>(d, second, i + hn::Lanes(d));
  }
};

inline TileArrays ArraysOf(const TileView& view) {
  return {view.parameter,
          view.master,
          {view.state[0], view.state[1], view.state[2]}};
}

inline GradientSum SumOf(const TileView& view, DType gradient) {
  return {{view.gradients.data(), view.gradients.size(), gradient, 0}};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
