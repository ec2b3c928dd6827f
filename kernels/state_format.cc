#include "kernels/state_format.h"

#include <cstddef>
#include <cstdint>

#include "kernels/cast.h"
#include "kernels/cpu/dynamic.h"
#include "kernels/cpu/stochastic.h"
#include "kernels/cpu/targets.h"
#include "proto/types/dtype.h"

namespace optstate::kernels {
namespace {

DType DTypeOf(StateFormat format) {
  return format == StateFormat::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
}

}  // namespace

void StateToFloat(StateFormat format, bool is_never_negative, const void* in,
                  const float* scale, float* out, size_t numel) {
  if (format != StateFormat::kDynamic8) {
    return CastToFloat(DTypeOf(format), in, out, numel);
  }
  cpu::DecodeOn(cpu::BestTarget(), !is_never_negative, in, scale, out, numel);
}

void StateFromFloat(StateFormat format, bool is_never_negative, const float* in,
                    void* out, float* scale, size_t numel) {
  if (format != StateFormat::kDynamic8) {
    return CastFromFloat(DTypeOf(format), in, out, numel);
  }
  cpu::EncodeOn(cpu::BestTarget(), !is_never_negative, in, out, scale, numel);
}

void StateFromUpdate(StateFormat format, bool is_never_negative,
                     const StateRandom& random, const float* in, void* out,
                     float* scale, size_t numel) {
  if (format != StateFormat::kBFloat16) {
    return StateFromFloat(format, is_never_negative, in, out, scale, numel);
  }
  cpu::RoundStochasticallyOn(cpu::BestTarget(), random.seed, random.array,
                             random.flat_begin, in, out, numel);
}

}  // namespace optstate::kernels
