#include "kernels/hyperparams.h"

#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace optstate {
namespace {

bool IsNonNegative(double value) { return std::isfinite(value) && value >= 0; }

// False for NaN too.
bool IsBeta(double value) { return value >= 0 && value < 1; }

absl::Status Invalid(absl::string_view what, double value) {
  return absl::InvalidArgumentError(
      absl::StrCat("Invalid ", what, ": ", value));
}

}  // namespace

absl::Status Validate(const Hyperparams& hyperparams) {
  // In the order in which torch.optim.Adam checks them.
  if (!IsNonNegative(hyperparams.lr)) {
    return Invalid("learning rate", hyperparams.lr);
  }
  if (!IsNonNegative(hyperparams.eps)) {
    return Invalid("epsilon value", hyperparams.eps);
  }
  if (!IsBeta(hyperparams.beta1)) {
    return Invalid("beta parameter at index 0", hyperparams.beta1);
  }
  if (!IsBeta(hyperparams.beta2)) {
    return Invalid("beta parameter at index 1", hyperparams.beta2);
  }
  if (!IsNonNegative(hyperparams.weight_decay)) {
    return Invalid("weight_decay value", hyperparams.weight_decay);
  }
  return absl::OkStatus();
}

}  // namespace optstate
