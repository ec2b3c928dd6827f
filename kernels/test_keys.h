#ifndef OPTSTATE_KERNELS_TEST_KEYS_H_
#define OPTSTATE_KERNELS_TEST_KEYS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {

inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16,
                                       DType::kFloat16};

// An optimizer with some of its options.
struct Variant {
  OptimizerKind kind;
  uint32_t options;
};

// Returns the variants that have element-wise kernels, with all sets of
// options.
std::vector<Variant> AllVariants();

// Returns a name such as "AdamWAmsgrad"; a valid test name.
std::string NameOf(const Variant& variant);

// Hyperparameters that together reach every branch of a variant's arithmetic.
struct Setting {
  std::string name;
  Hyperparams hyperparams;
};
std::vector<Setting> SettingsOf(const Variant& variant);

// Returns a kernel's factors for a step, with the optimizer's number per
// parameter as the steps before made it.
UpdateFactors FactorsAt(const UpdateKernel& kernel, OptimizerKind kind,
                        UpdateInput input);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_TEST_KEYS_H_
