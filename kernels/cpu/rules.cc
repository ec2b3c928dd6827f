#include "kernels/cpu/rules.h"

#include <cstdint>

#include "proto/types/dtype.h"

namespace optstate::kernels::cpu {
namespace {

struct Row {
  OptimizerKind kind;
  RuleFunction kernels;
};

#define OPTSTATE_RULE_ROW(KIND, NAME) {OptimizerKind::KIND, &NAME##Kernels},
constexpr Row kRows[] = {OPTSTATE_RULES(OPTSTATE_RULE_ROW)};
#undef OPTSTATE_RULE_ROW

bool AllBitsExist(const UpdateKernelKey& key) {
  return key.options >> InfoOf(key.optimizer).options.size() == 0 &&
         IsValidDType(static_cast<uint32_t>(key.gradient)) &&
         IsValidDType(static_cast<uint32_t>(key.parameter)) &&
         key.state >= StateFormat::kFloat32 &&
         key.state <= StateFormat::kDynamic8 &&
         (key.master != MasterFormat::kSplit ||
          key.parameter == DType::kBFloat16);
}

}  // namespace

const UpdateKernel* FindKernel(const UpdateKernelKey& key, Target target) {
  for (const Row& row : kRows) {
    if (row.kind != key.optimizer) continue;
    if (!AllBitsExist(key)) return nullptr;
    return &row.kernels(key.optimizer, key.options, target)
                .Of(key.state, key.gradient, key.parameter, key.master);
  }
  return nullptr;
}

}  // namespace optstate::kernels::cpu
