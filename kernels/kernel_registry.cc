#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/adam.h"
#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer_kind.h"

namespace optstate {
namespace {

bool IsValidOptimizerKind(OptimizerKind kind) {
  return kind == OptimizerKind::kAdam || kind == OptimizerKind::kAdamW;
}

bool HasKernel(const UpdateKernelKey& key) {
  return IsValidOptimizerKind(key.optimizer) &&
         IsValidDType(static_cast<uint32_t>(key.gradient)) &&
         IsValidDType(static_cast<uint32_t>(key.parameter));
}

absl::Status NoKernel(const UpdateKernelKey& key) {
  return absl::UnimplementedError(absl::StrCat(
      "no update kernel for optimizer ", static_cast<int>(key.optimizer),
      key.amsgrad ? " with amsgrad" : "", ", gradient ", Name(key.gradient),
      " (", static_cast<int>(key.gradient), "), parameter ",
      Name(key.parameter), " (", static_cast<int>(key.parameter), ")"));
}

}  // namespace

absl::StatusOr<const UpdateKernel*> FindUpdateKernel(
    const UpdateKernelKey& key) {
  if (!HasKernel(key)) return NoKernel(key);
  return cpu::AdamKernel(key, cpu::BestTarget());
}

}  // namespace optstate
