#include "kernels/cpu/memory_roof.h"

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/memory_roof.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;

HWY_INLINE hn::Vec<Floats> LoadAny(Floats d, const float* from) {
  return hn::LoadU(d, from);
}

// Loads the 16 bits as they are: converting them is the kernel's work.
HWY_INLINE hn::Vec<Floats> LoadAny(Floats d, const uint16_t* from) {
  const hn::Rebind<uint16_t, Floats> d16;
  const hn::RebindToSigned<Floats> di;
  return hn::BitCast(d, hn::PromoteTo(di, hn::LoadU(d16, from)));
}

HWY_INLINE void StoreAny(Floats d, hn::Vec<Floats> v, float* to) {
  hn::StoreU(v, d, to);
}

HWY_INLINE void StoreAny(Floats, hn::Vec<Floats> v, uint16_t* to) {
  const hn::Rebind<uint16_t, Floats> d16;
  const hn::RebindToSigned<Floats> di;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, v)), d16, to);
}

template <typename Element>
void AddAll(const TileView& view) {
  const Floats d;
  const auto* gradient = static_cast<const Element*>(view.gradients[0]);
  auto* parameter = static_cast<Element*>(view.parameter);
  auto* master = static_cast<float*>(view.master);
  auto* exp_avg = static_cast<float*>(view.state[0]);
  auto* exp_avg_sq = static_cast<float*>(view.state[1]);
  const auto zero = hn::Zero(d);
  for (size_t i = 0; i + hn::Lanes(d) <= view.numel; i += hn::Lanes(d)) {
    const auto g = LoadAny(d, gradient + i);
    const auto p = hn::LoadU(d, master + i);
    const auto m = hn::LoadU(d, exp_avg + i);
    const auto v = hn::LoadU(d, exp_avg_sq + i);
    // A parameter of floats is the master.
    if constexpr (sizeof(Element) == sizeof(uint16_t)) {
      hn::StoreU(hn::Add(p, zero), d, master + i);
    }
    hn::StoreU(hn::Add(m, zero), d, exp_avg + i);
    hn::StoreU(hn::Add(v, zero), d, exp_avg_sq + i);
    StoreAny(d, hn::Add(p, g), parameter + i);
  }
}

void AddAllOfDType(DType dtype, const TileView& view) {
  return dtype == DType::kFloat32 ? AddAll<float>(view)
                                  : AddAll<uint16_t>(view);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::kernels::cpu {
namespace {

constexpr auto kAddAllOfDType = OPTSTATE_TARGET_TABLE(AddAllOfDType);

}  // namespace

void MemoryRoof(DType dtype, const TileView& view) {
  kAddAllOfDType.For(BestTarget())(dtype, view);
}

}  // namespace optstate::kernels::cpu

#endif  // HWY_ONCE
