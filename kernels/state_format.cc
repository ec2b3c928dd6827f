#include "kernels/state_format.h"

#include <cstddef>

#include "kernels/cast.h"
#include "kernels/cpu/dynamic.h"
#include "kernels/cpu/rules.h"
#include "kernels/cpu/targets.h"
#include "proto/types/dtype.h"

namespace optstate {
namespace {

DType DTypeOf(StateFormat format) {
  return format == StateFormat::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
}

}  // namespace

bool IsNeverNegative(OptimizerKind kind, int array) {
  return (cpu::SquaresOf(kind) >> array & 1) != 0;
}

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

}  // namespace optstate
