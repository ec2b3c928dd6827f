// The common parts of the kernels of whole parameters. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_WHOLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_WHOLE_INL_H_
#undef OPTSTATE_KERNELS_CPU_WHOLE_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_WHOLE_INL_H_
#endif

#include <array>
#include <cstddef>
#include <cstring>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/cpu/reduce.h"
#include "kernels/reduction.h"
#include "kernels/rules/whole-inl.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <size_t kCount>
using Inputs = std::array<const float*, kCount>;
template <size_t kCount>
using Outputs = std::array<float*, kCount>;

// Calls body(d, in, out, i) for each vector of elements; `body` loads in[k] + i
// and stores to out[k] + i, where `out` may be one of `in`. The last elements,
// fewer than a vector, take the same path on the stack, so that no result
// depends on where an array ends.
template <size_t kIn, size_t kOut, class Body>
HWY_INLINE void ForVectors(size_t numel, const Inputs<kIn>& in,
                           const Outputs<kOut>& out, const Body& body) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= numel; i += lanes) body(d, in, out, i);
  if (i == numel) return;
  constexpr size_t kLanes = hn::MaxLanes(d);
  HWY_ALIGN float stack[kIn + kOut][kLanes] = {};
  Inputs<kIn> tail_in;
  Outputs<kOut> tail_out;
  const size_t bytes = (numel - i) * sizeof(float);
  for (size_t k = 0; k < kIn; ++k) {
    std::memcpy(stack[k], in[k] + i, bytes);
    tail_in[k] = stack[k];
  }
  for (size_t k = 0; k < kOut; ++k) tail_out[k] = stack[kIn + k];
  body(d, tail_in, tail_out, 0);
  for (size_t k = 0; k < kOut; ++k) {
    std::memcpy(out[k] + i, tail_out[k], bytes);
  }
}

inline double SumOfSquares(const float* elements, size_t numel) {
  const void* array = elements;
  return ReduceOn(HWY_TARGET, Reduction::kSumOfSquares, DType::kFloat32,
                  absl::MakeConstSpan(&array, 1), numel);
}

// Computes each new master (Descended of rules/whole-inl.h); `update` may be
// new_master.
inline void Descend(const float* master, const float* update, float decay,
                    float step, size_t numel, float* new_master) {
  ForVectors<2, 1>(numel, {master, update}, {new_master},
                   [decay, step](auto d, const auto& in, const auto& out,
                                 size_t i) HWY_ATTR {
                     hn::StoreU(Descended(d, hn::LoadU(d, in[0] + i),
                                          hn::LoadU(d, in[1] + i), decay, step),
                                d, out[0] + i);
                   });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

// Defines, in a kernel's HWY_ONCE section, the function NAME of whole_rules.h,
// which asks OF_TARGET of each target's namespace.
#ifndef OPTSTATE_EXPORT_WHOLE_RULE
#define OPTSTATE_EXPORT_WHOLE_RULE(NAME, OF_TARGET)                     \
  namespace optstate::kernels::cpu {                                    \
  const WholeKernel& NAME(Target target) {                              \
    static constexpr auto kOfTarget = OPTSTATE_TARGET_TABLE(OF_TARGET); \
    return kOfTarget.For(target)();                                     \
  }                                                                     \
  }
#endif

#endif  // per-target include guard
