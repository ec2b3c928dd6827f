// Masters whose upper half is the bfloat16 parameter. Per-target include.

#if defined(OPTSTATE_KERNELS_OPS_SPLIT_MASTER_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_OPS_SPLIT_MASTER_INL_H_
#undef OPTSTATE_KERNELS_OPS_SPLIT_MASTER_INL_H_
#else
#define OPTSTATE_KERNELS_OPS_SPLIT_MASTER_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "kernels/ops/float16-inl.h"
#include "proto/types/dtype.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

// Returns the bytes of an element of TileView::master.
constexpr size_t BytesOfMaster(MasterFormat format) {
  return format == MasterFormat::kSplit ? sizeof(uint16_t) : sizeof(float);
}

// Vector forms of JoinMaster and SplitMaster (split_master.h).
template <class D>
OPTSTATE_OP ops::Vec<D> LoadSplit(D d, const uint16_t* parameter,
                                  const uint16_t* low) {
  const ops::RebindToSigned<D> di;
  const ops::Rebind<int16_t, D> d16;
  const auto upper = ops::ShiftLeft<16>(ops::PromoteTo(
      di, ops::LoadU(d16, reinterpret_cast<const int16_t*>(parameter))));
  const auto lower = ops::PromoteTo(
      di, ops::LoadU(d16, reinterpret_cast<const int16_t*>(low)));
  return ops::BitCast(d, ops::Add(upper, lower));
}

// NaN must be the canonical one: rounding up would make numbers of others.
template <class D, class V>
OPTSTATE_OP void StoreSplit(D d, V v, uint16_t* parameter, uint16_t* low) {
  const ops::RebindToUnsigned<D> du;
  const auto bits = ops::BitCast(du, v);
  const auto upper = ops::Add(bits, ops::Set(du, uint32_t{0x8000}));
  StoreHalves(d, ops::ShiftRight<16>(upper), parameter);
  StoreHalves(d, bits, low);
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
