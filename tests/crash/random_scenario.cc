#include "tests/crash/random_scenario.h"

namespace optstate::crash {
namespace {

std::vector<OptimizerKind> AllOptimizers() {
  std::vector<OptimizerKind> all;
  for (const OptimizerInfo& info : Optimizers()) all.push_back(info.kind);
  return all;
}

std::vector<DTypes> AllDTypes() {
  return {DTypes::kFloat32, DTypes::kBFloat16, DTypes::kFloat16,
          DTypes::kMixed};
}

// Keeps dtypes that suit split masters: only bfloat16 parameters have them;
// others may be beside them.
DTypes WithSplitMasters(DTypes dtypes) {
  return dtypes == DTypes::kMixed ? DTypes::kMixed : DTypes::kBFloat16;
}

std::vector<StatePlace> StatePlaces(bool on_disk) {
  if (!on_disk) return {StatePlace::kMemory};
  return {StatePlace::kDisk, StatePlace::kDiskDurable,
          StatePlace::kDiskWithParameters, StatePlace::kMemoryDurable};
}

}  // namespace

RandomScenarios::RandomScenarios(bool on_disk)
    : wires_({Wire::kShm, Wire::kGrpc}),
      world_sizes_({1, 2}),
      optimizers_(AllOptimizers()),
      state_formats_({StateFormat::kFloat32, StateFormat::kBFloat16,
                      StateFormat::kDynamic8}),
      master_formats_({MasterFormat::kFloat32, MasterFormat::kSplit}),
      partitions_({PartitionMode::kGreedy, PartitionMode::kContiguous,
                   PartitionMode::kReplicated}),
      accumulations_(
          {{}, AccumulateDType::kFloat32, AccumulateDType::kGradient}),
      parameters_(AllDTypes()),
      gradients_(AllDTypes()),
      clip_({0, 1}),
      skip_({0, 1}),
      missing_({0, 1}),
      clip_groups_({0, 1}),
      clip_elements_({0, 1}),
      speculative_({0, 1}),
      shared_({0, 1}),
      norm_types_({NormType::kL1, NormType::kL2, NormType::kInfinity}),
      scalings_({Scaling::kRanks, Scaling::kStatic, Scaling::kDynamic}),
      state_places_(StatePlaces(on_disk)) {}

RandomScenarios::Drawn RandomScenarios::Next(std::mt19937_64& random) {
  Drawn drawn;
  drawn.wire = wires_.Draw(random);
  Scenario& scenario = drawn.scenario;
  scenario.seed = random();
  scenario.world_size = world_sizes_.Draw(random);
  scenario.optimizer = optimizers_.Draw(random);
  scenario.partition = partitions_.Draw(random);
  scenario.accumulation = accumulations_.Draw(random);
  scenario.parameters = parameters_.Draw(random);
  scenario.gradients = gradients_.Draw(random);
  scenario.clip = clip_.Draw(random) != 0;
  scenario.skip = skip_.Draw(random) != 0;
  scenario.missing = missing_.Draw(random) != 0;
  scenario.clip_groups = clip_groups_.Draw(random) != 0;
  scenario.clip_elements = clip_elements_.Draw(random) != 0;
  scenario.norm_type = norm_types_.Draw(random);
  scenario.scaling = scalings_.Draw(random);
  scenario.speculative = speculative_.Draw(random) != 0;
  scenario.shared = shared_.Draw(random) != 0;
  scenario.state_format = state_formats_.Draw(random);
  scenario.master_format = master_formats_.Draw(random);
  scenario.state_place = state_places_.Draw(random);
  if (scenario.master_format == MasterFormat::kSplit) {
    scenario.parameters = WithSplitMasters(scenario.parameters);
  }
  return drawn;
}

}  // namespace optstate::crash
