#include "kernels/cuda/serial_launch.h"

#include "kernels/cuda/block_kernels.h"
#include "kernels/cuda/whole_blocks.h"
#include "kernels/ops/scalar_ops.h"
// This include comes after scalar_ops.h.
#include "kernels/rules/all_rules-inl.h"

namespace optstate::kernels::cuda {

bool UpdateSerially(SerialBlock::Order order, OptimizerKind kind,
                    uint32_t options, absl::Span<const TileTask> tasks,
                    const UpdateFactors* factors) {
  const auto launch = [&]<class Rule>() {
    for (const TileTask& task : tasks) {
      UpdateShared shared;
      UpdateTile<Rule>(SerialBlock(order), task, factors[task.factors],
                       &shared);
    }
    return true;
  };
  switch (kind) {
#define OPTSTATE_LAUNCH_CASE(KIND, NAME) \
  case OptimizerKind::KIND:              \
    return scalar::Visit##NAME(kind, options, launch);
    // Some optimizers share a rule.
    OPTSTATE_RULES(OPTSTATE_LAUNCH_CASE)  // NOLINT(bugprone-branch-clone)
#undef OPTSTATE_LAUNCH_CASE
    default:
      return false;
  }
}

bool UpdateWholeSerially(SerialBlock::Order order, OptimizerKind kind,
                         absl::Span<const WholeTask> tasks, uint32_t rounds) {
  if (!HasWholeBlocks(kind)) return false;
  // A block finds what others have left here.
  WholeShared shared = {};
  return VisitWholeRule(kind, [&]<class Rule>() {
    return VisitWholePhases<Rule>(
        rounds, [&]<WholePhase kPhase>(uint32_t round) {
          for (const WholeTask& task : tasks) {
            for (uint32_t part = 0; part < WholeParts(kPhase); ++part) {
              RunWholePhase<Rule, kPhase>(SerialBlock(order), task, part, round,
                                          &shared);
            }
          }
          return true;
        });
  });
}

uint64_t DigestSerially(SerialBlock::Order order, const DigestTask& task) {
  static_assert(kDigestThreads == kBlockThreads);
  DigestShared shared;
  uint64_t digest = 0;
  DigestArray(SerialBlock(order), task, &digest, &shared);
  return digest;
}

}  // namespace optstate::kernels::cuda
