#ifndef OPTSTATE_TESTS_CRASH_RANDOM_SCENARIO_H_
#define OPTSTATE_TESTS_CRASH_RANDOM_SCENARIO_H_

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "tests/crash/scenario.h"
#include "tests/crash/wire.h"

namespace optstate::crash {

// Values in random order, each as often as the others: a few rounds that were
// drawn independently would leave some of them out.
template <typename T>
class Deck {
 public:
  explicit Deck(std::vector<T> all) : all_(std::move(all)) {}

  T Draw(std::mt19937_64& random) {
    if (left_.empty()) {
      left_ = all_;
      std::shuffle(left_.begin(), left_.end(), random);
    }
    const T drawn = left_.back();
    left_.pop_back();
    return drawn;
  }

 private:
  const std::vector<T> all_;
  std::vector<T> left_;
};

// Draws what rounds do, one by one.
class RandomScenarios {
 public:
  // `on_disk`: draws jobs whose records are on disk, or steps durable, alone;
  // otherwise jobs in memory alone.
  explicit RandomScenarios(bool on_disk);

  struct Drawn {
    Wire wire = Wire::kShm;
    Scenario scenario;  // without sizes
  };
  // Returns a valid scenario: where two draws exclude each other, the
  // optimizer, then the master format, has its way.
  Drawn Next(std::mt19937_64& random);

 private:
  Deck<Wire> wires_;
  Deck<uint32_t> world_sizes_;
  Deck<OptimizerKind> optimizers_;
  Deck<StateFormat> state_formats_;
  Deck<MasterFormat> master_formats_;
  Deck<PartitionMode> partitions_;
  Deck<Accumulation> accumulations_;
  Deck<DTypes> parameters_;
  Deck<DTypes> gradients_;
  Deck<int> clip_, skip_, missing_, clip_groups_, clip_elements_, speculative_;
  Deck<int> shared_;
  Deck<NormType> norm_types_;
  Deck<Scaling> scalings_;
  Deck<StatePlace> state_places_;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_RANDOM_SCENARIO_H_
