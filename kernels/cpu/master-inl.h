// Masters whose upper half is the bfloat16 parameter. Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_MASTER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_MASTER_INL_H_
#undef OPTSTATE_KERNELS_CPU_MASTER_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_MASTER_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/float16-inl.h"
#include "proto/types/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Returns the bytes of an element of TileView::master.
constexpr size_t BytesOfMaster(MasterFormat format) {
  return format == MasterFormat::kSplit ? sizeof(uint16_t) : sizeof(float);
}

// Vector forms of JoinMaster and SplitMaster (split_master.h).
template <class D>
HWY_INLINE hn::Vec<D> LoadSplit(D d, const uint16_t* parameter,
                                const uint16_t* low) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<int16_t, D> d16;
  const auto upper = hn::ShiftLeft<16>(hn::PromoteTo(
      di, hn::LoadU(d16, reinterpret_cast<const int16_t*>(parameter))));
  const auto lower =
      hn::PromoteTo(di, hn::LoadU(d16, reinterpret_cast<const int16_t*>(low)));
  return hn::BitCast(d, hn::Add(upper, lower));
}

// NaN must be the canonical one: rounding up would make numbers of others.
template <class D, class V>
HWY_INLINE void StoreSplit(D d, V v, uint16_t* parameter, uint16_t* low) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v);
  const auto upper = hn::Add(bits, hn::Set(du, uint32_t{0x8000}));
  StoreHalves(d, hn::ShiftRight<16>(upper), parameter);
  StoreHalves(d, bits, low);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
