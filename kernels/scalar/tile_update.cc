#include "kernels/scalar/tile_update.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/ops/scalar_ops.h"
// These includes come after scalar_ops.h.
#include "kernels/ops/gradient_sum-inl.h"
#include "kernels/ops/reduction-inl.h"
#include "kernels/reduction.h"
#include "kernels/reduction_order.h"
#include "kernels/rules/all_rules-inl.h"
#include "kernels/scalar/element_update.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels::scalar {
namespace {

// Updates elements [begin, end), a block or the rest of the view.
template <class Rule>
void UpdateBlock(const GradientScale& scale, const Rule& rule,
                 const TileElements& tile, size_t begin, size_t end) {
  BlockStates block[kQuantizedBlockElements];
  int32_t largest[kStateArraysMax] = {};
  for (size_t i = begin; i < end; ++i) {
    block[i - begin] = BeginBlockElement(scale, rule, tile, i);
    for (int k = 0; k < kStateArraysMax; ++k) {
      largest[k] =
          std::max(largest[k], MagnitudeBits(block[i - begin].state[k]));
    }
  }
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!HasState<Rule>(k)) continue;
    const float block_scale = ScaleOf(largest[k]);
    tile.scale[k][begin / kQuantizedBlockElements] = block_scale;
    for (size_t i = begin; i < end; ++i) {
      EndBlockElement<Rule>(tile, k, i, block[i - begin].state[k], block_scale);
    }
  }
}

template <class Rule>
void UpdateTileOf(const UpdateKernelKey& key, const UpdateFactors& factors,
                  const TileView& view) {
  const GradientScale scale(factors);
  const Rule rule(factors);
  const TileElements tile = TileElementsOf(key, factors, view);
  if (key.state == StateFormat::kDynamic8) {
    for (size_t begin = view.begin; begin < view.numel;
         begin += kQuantizedBlockElements) {
      UpdateBlock(scale, rule, tile, begin,
                  std::min(begin + kQuantizedBlockElements, view.numel));
    }
    return;
  }
  for (size_t i = view.begin; i < view.numel; ++i) {
    UpdateElement(scale, rule, tile, i);
  }
}

template <Reduction kReduction>
void TakeElements(const GradientElements& gradient, size_t numel,
                  double* accumulators) {
  for (size_t i = 0; i < numel; ++i) {
    double& accumulator = accumulators[i % kReductionAccumulators];
    const double element = gradient.Load(ops::FloatTag(), i);
    accumulator = Taken<kReduction>(accumulator, element);
  }
}

}  // namespace

bool UpdateTile(const UpdateKernelKey& key, const UpdateFactors& factors,
                const TileView& view) {
  switch (key.optimizer) {
#define OPTSTATE_UPDATE_CASE(KIND, NAME)                        \
  case OptimizerKind::KIND:                                     \
    Visit##NAME(key.optimizer, key.options, [&]<class Rule>() { \
      UpdateTileOf<Rule>(key, factors, view);                   \
    });                                                         \
    return true;
    OPTSTATE_RULES(OPTSTATE_UPDATE_CASE)
#undef OPTSTATE_UPDATE_CASE
    default:
      return false;
  }
}

double ReduceElements(Reduction reduction, DType dtype,
                      absl::Span<const void* const> gradients, size_t numel) {
  const GradientElements gradient = {gradients.data(), gradients.size(), dtype,
                                     0};
  double accumulators[kReductionAccumulators] = {};
  switch (reduction) {
    case Reduction::kSumOfSquares:
      TakeElements<Reduction::kSumOfSquares>(gradient, numel, accumulators);
      break;
    case Reduction::kSumOfAbsolutes:
      TakeElements<Reduction::kSumOfAbsolutes>(gradient, numel, accumulators);
      break;
    case Reduction::kLargestAbsolute:
      TakeElements<Reduction::kLargestAbsolute>(gradient, numel, accumulators);
      break;
  }
  return ResultOfAccumulators(reduction, accumulators);
}

}  // namespace optstate::kernels::scalar
