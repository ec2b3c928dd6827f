#ifndef OPTSTATE_TESTS_CRASH_SCENARIO_H_
#define OPTSTATE_TESTS_CRASH_SCENARIO_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/types/accumulation.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"

namespace optstate::crash {

// The dtypes of all parameters, or of all gradients. Except for the last,
// values equal those of DType.
enum class DTypes : uint8_t { kFloat32 = 1, kBFloat16, kFloat16, kMixed };

// The party that decides what gradients are divided by: the ranks, or the job's
// scaler.
enum class Scaling : uint8_t { kRanks = 1, kStatic, kDynamic };

// The norm that max_norm limits.
enum class NormType : uint8_t { kL1 = 1, kL2, kInfinity };

// The place of a job's records, and whether each step survives a loss of power.
enum class StatePlace : uint8_t {
  kMemory = 1,
  kMemoryDurable,
  kDisk,
  kDiskDurable,
  kDiskWithParameters,  // durable; ranks fetch parameters
};

// The actions of a round's ranks. Everything else follows from it, so that a
// rank that takes another's place needs nothing more.
struct Scenario {
  uint64_t seed = 0;
  uint64_t elements = 1 << 20;  // about
  uint64_t steps = 1;
  uint32_t world_size = 1;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  StateFormat state_format = StateFormat::kFloat32;
  MasterFormat master_format = MasterFormat::kFloat32;
  PartitionMode partition = PartitionMode::kGreedy;
  Accumulation accumulation;  // with it, three micro-steps a step
  DTypes parameters = DTypes::kFloat32;
  DTypes gradients = DTypes::kFloat32;
  bool clip = false;         // max_norm in every step
  bool skip = false;         // found_inf or an infinite gradient in some steps
  bool missing = false;      // some parameters have no gradient in some steps
  bool clip_groups = false;  // a max_norm of its own for some groups
  bool clip_elements = false;  // max_value in every step
  NormType norm_type = NormType::kL2;
  Scaling scaling = Scaling::kRanks;
  bool speculative = false;  // the job asks for it, where it may
  StatePlace state_place = StatePlace::kMemory;
  bool shared = false;  // devices update a part, where they may

  // Says whether a gradient is infinite in some steps: without, a scaler only
  // grows.
  bool overflows() const { return skip || scaling == Scaling::kDynamic; }
  // Says whether the daemon begins steps early. Updates that need whole
  // parameters, and records with a disk, are not rolled back.
  bool speculates() const {
    return speculative && state_place == StatePlace::kMemory &&
           optimizer != OptimizerKind::kLamb &&
           optimizer != OptimizerKind::kAdafactor &&
           optimizer != OptimizerKind::kMuon;
  }
  // Says whether devices update a part of the elements. Emulated ones take long
  // for Muon's products.
  bool shares() const { return shared && optimizer != OptimizerKind::kMuon; }
  // Says whether records stay on devices, where they may.
  bool keeps_on_devices() const {
    return shares() && !has_parameters_on_disk() && !speculates();
  }
  // Says whether each answered step survives a loss of power.
  bool durable() const {
    return state_place == StatePlace::kMemoryDurable ||
           state_place == StatePlace::kDiskDurable || has_parameters_on_disk();
  }
  // Says whether records are swapped.
  bool swapped() const {
    return state_place == StatePlace::kDisk ||
           state_place == StatePlace::kDiskDurable || has_parameters_on_disk();
  }
  bool has_parameters_on_disk() const {
    return state_place == StatePlace::kDiskWithParameters;
  }
  uint32_t micro_steps() const { return accumulation.has_value() ? 3 : 1; }
  // Says whether the engine sums the ranks' micro-steps, so that a rank that is
  // lost takes all that was summed along.
  bool accumulates_together() const {
    return accumulation.has_value() && partition == PartitionMode::kReplicated;
  }

  // Returns one word, for a command line.
  std::string ToWord() const;
  static absl::StatusOr<Scenario> FromWord(const std::string& word);

  // Returns the choice of each kind: {"optimizer", "adamw"}, ...
  std::vector<std::pair<std::string, std::string>> Choices() const;
  // Returns "optimizer adamw, state dynamic8, ..."
  std::string Describe() const;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_SCENARIO_H_
