// The one walk over a tile that every update rule (rule-inl.h) shares.
// Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#undef OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_UPDATE_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/finish_xor-inl.h"
#include "kernels/cpu/keep-inl.h"
#include "kernels/cpu/tile_arrays-inl.h"
#include "kernels/cpu/update_pairs-inl.h"
#include "kernels/cpu/update_tail-inl.h"
#include "kernels/cpu/update_vector-inl.h"
#include "kernels/rules/rule-inl.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Updates elements [begin, end) of `arrays`, whose element 0 is `number` in the
// view.
template <bool kPlain, Keep kKeep, class Rule, class Arrays>
HWY_NOINLINE void UpdateVectors(const GradientScale& its_scale,
                                const Rule& its_rule, Arrays arrays,
                                size_t begin, size_t end, size_t number,
                                UndoSlot* undo) {
  // The copies have no address, as in UpdateWithCare.
  const GradientScale scale = its_scale;
  const Rule rule = its_rule;
  const hn::ScalableTag<float> d;
  static_assert(hn::MaxLanes(d) <= kUndoVectorElements);
  const size_t lanes = hn::Lanes(d);
  size_t i = begin;
  size_t position = 0;
  // A scalable vector may be too long for two of them, but none that was built
  // yet is.
  if (!HWY_HAVE_SCALABLE || 2 * lanes <= kUndoVectorElements) {
    if constexpr (kPlain) {
      i = UpdatePlainPairs<kKeep>(d, scale, rule, arrays, i, end, number, undo,
                                  &position);
    } else if constexpr (!HasHalves<Rule>()) {
      for (; i + 2 * lanes <= end; i += 2 * lanes) {
        PrefetchInputs<Rule>(d, arrays, i + kPrefetchElements);
        PrefetchSecondInputs<Rule>(d, arrays, i + lanes + kPrefetchElements);
        UpdatePair<kKeep>(d, scale, rule, arrays, i, undo, number + i,
                          position);
        position ^= kUndoVectorElements;
      }
    }
  }
  constexpr Keep kKeepOfOne = KeepOfOne<kKeep>();
  for (; i + lanes <= end; i += lanes) {
    PrefetchInputs<Rule>(d, arrays, i + kPrefetchElements);
    if (!UpdateVector<kPlain, kKeepOfOne>(d, scale, rule, arrays, i, undo,
                                          number + i, position)) {
      UpdateWithCare<kKeepOfOne>(d, scale, rule, arrays, i, i + lanes, undo,
                                 number + i, position);
    }
    position ^= kUndoVectorElements;
  }
  if (i < end) {
    UpdateTail(d, scale, rule, arrays, i, end - i, undo, number + i, position);
  }
}

template <Keep kKeep, class Rule, class Arrays>
void UpdateKeeping(const UpdateFactors& factors, const Arrays& arrays,
                   size_t begin, size_t end, size_t number, UndoSlot* undo) {
  const GradientScale scale(factors);
  const Rule rule(factors);
  if constexpr (HasHalves<Rule>()) {
    if (scale.HasPlain() && rule.HasPlain()) {
      return UpdateVectors<true, kKeep>(scale, rule, arrays, begin, end, number,
                                        undo);
    }
  }
  UpdateVectors<false, KeepOfOne<kKeep>()>(scale, rule, arrays, begin, end,
                                           number, undo);
}

template <class Rule, class Arrays>
void UpdateRange(const UpdateFactors& factors, const Arrays& arrays,
                 size_t begin, size_t end, size_t number, UndoSlot* undo) {
  if (undo == nullptr) {
    UpdateKeeping<Keep::kNothing, Rule>(factors, arrays, begin, end, number,
                                        undo);
  } else {
    UpdateKeeping<KeepOf<Rule, Arrays>(), Rule>(factors, arrays, begin, end,
                                                number, undo);
  }
}

// Calls update(arrays) with the arrays of the view as a class that knows their
// dtypes.
template <DType kGradient, DType kParameter, MasterFormat kMaster, class Update>
HWY_INLINE void WithFixedArrays(const TileView& view, const Update& update) {
  if (view.gradients.size() == 1) {
    return update(FixedArrays<kGradient, kParameter, kMaster>{
        ArraysOf(view), view.gradients[0]});
  }
  update(SumArrays<kParameter, kMaster>{{ArraysOf(view), nullptr},
                                        SumOf(view, kGradient)});
}

// Implements UpdateKernel::apply of a rule and a pair of dtypes.
template <class Rule, DType kGradient, DType kParameter, MasterFormat kMaster>
void UpdateFixed(const UpdateFactors& factors, const TileView& view) {
  using OfFloats = FixedArrays<DType::kFloat32, kParameter, kMaster>;
  size_t begin = view.begin;
  if constexpr (KeepOf<Rule, OfFloats>() == Keep::kXor) {
    if (view.undo != nullptr) {
      begin = FinishXor<Rule>(factors, view, kGradient,
                              OfFloats{ArraysOf(view), nullptr});
    }
  }
  WithFixedArrays<kGradient, kParameter, kMaster>(
      view, [&](const auto& arrays) HWY_ATTR {
        UpdateRange<Rule>(factors, arrays, begin, view.numel, 0, view.undo);
      });
}

inline AnyArrays ArraysOf(const TileView& view, DType gradient, DType parameter,
                          StateFormat state, MasterFormat master,
                          uint32_t random_seed) {
  return {{ArraysOf(view), parameter, state, master, view.flat_begin,
           RandomKeysOf(random_seed, view.flat_begin)},
          SumOf(view, gradient)};
}

template <class Rule>
HWY_NOINLINE void UpdateOfFormats(const UpdateFactors& factors,
                                  const TileView& view, DType gradient,
                                  DType parameter, StateFormat state,
                                  MasterFormat master) {
  UpdateRange<Rule>(
      factors,
      ArraysOf(view, gradient, parameter, state, master, factors.random_seed),
      view.begin, view.numel, 0, view.undo);
}

// Implements UpdateKernel::apply of a rule with state arrays of float or
// bfloat16.
template <class Rule, DType kGradient, DType kParameter, MasterFormat kMaster,
          StateFormat kState>
void UpdateAny(const UpdateFactors& factors, const TileView& view) {
  UpdateOfFormats<Rule>(factors, view, kGradient, kParameter, kState, kMaster);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
