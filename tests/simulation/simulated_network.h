#ifndef OPTSTATE_TESTS_SIMULATION_SIMULATED_NETWORK_H_
#define OPTSTATE_TESTS_SIMULATION_SIMULATED_NETWORK_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/time/time.h"
#include "tests/simulation/world.h"

namespace optstate::simulation {

// The network between nodes. A message takes a drawn time, and longer when it
// is lost and sent again, as over TCP; a part of the nodes may be cut off for a
// while, and nodes may fail for good.
//
// Threads: one at a time.
class SimulatedNetwork {
 public:
  struct Counts {
    uint64_t messages = 0;
    uint64_t bytes = 0;
    uint64_t sent_again = 0;   // lost, and sent once more
    uint64_t held = 0;         // until the end of a partition
    uint64_t undelivered = 0;  // from or to a node that had failed
  };

  // `world` outlives the network.
  SimulatedNetwork(World* world, uint32_t nodes);
  SimulatedNetwork(const SimulatedNetwork&) = delete;
  SimulatedNetwork& operator=(const SimulatedNetwork&) = delete;

  // Has `deliver` called when the message is at its node. It is not called when
  // that node fails before, nor when the sender fails before a message that was
  // lost is sent again.
  void Send(uint32_t from, uint32_t to, uint64_t bytes,
            std::function<void()> deliver);

  // The node is gone: nothing reaches it or leaves it any more.
  void Fail(uint32_t node) { failed_[node] = true; }
  bool failed(uint32_t node) const { return failed_[node]; }

  // Holds what is sent between a node of `side` and another one for `time`.
  void Part(const std::vector<uint32_t>& side, absl::Duration time);

  const Counts& counts() const { return counts_; }

 private:
  bool AreParted(uint32_t from, uint32_t to) const {
    return world_.queue.now() < parted_until_ &&
           is_on_side_[from] != is_on_side_[to];
  }

  World& world_;
  std::vector<bool> failed_;
  std::vector<bool> is_on_side_;
  absl::Time parted_until_ = absl::InfinitePast();
  Counts counts_;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_SIMULATED_NETWORK_H_
