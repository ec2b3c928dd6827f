#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/rules.h"
#include "kernels/cpu/targets.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

absl::Status NoKernel(const UpdateKernelKey& key) {
  const auto kind = static_cast<uint32_t>(key.optimizer);
  const OptimizerInfo* info = FindOptimizer(kind);
  return absl::UnimplementedError(absl::StrCat(
      "no update kernel for optimizer ", kind, " (",
      info == nullptr ? "invalid" : info->name, ") with options ", key.options,
      ", gradient ", Name(key.gradient), " (", static_cast<int>(key.gradient),
      "), parameter ", Name(key.parameter), " (",
      static_cast<int>(key.parameter), "), state format ",
      static_cast<int>(key.state), ", master ", Name(key.master)));
}

}  // namespace

absl::StatusOr<const UpdateKernel*> FindUpdateKernel(
    const UpdateKernelKey& key) {
  const UpdateKernel* kernel = cpu::FindKernel(key, cpu::BestTarget());
  if (kernel == nullptr) return NoKernel(key);
  return kernel;
}

}  // namespace optstate::kernels
