#include "tests/simulation/simulated_network.h"

#include <utility>

namespace optstate::simulation {
namespace {

// A message that was lost so often arrives.
constexpr int kLossesMax = 6;

}  // namespace

SimulatedNetwork::SimulatedNetwork(World* world, uint32_t nodes)
    : world_(*world), failed_(nodes, false), is_on_side_(nodes, false) {}

void SimulatedNetwork::Send(uint32_t from, uint32_t to, uint64_t bytes,
                            std::function<void()> deliver) {
  ++counts_.messages;
  counts_.bytes += bytes;
  absl::Duration delay = world_.Draw(world_.model.network) +
                         absl::Seconds(static_cast<double>(bytes) /
                                       world_.model.network_bytes_per_s);
  absl::Duration again = world_.model.retransmission;
  int losses = 0;
  while (losses < kLossesMax &&
         world_.draw.Chance(world_.model.loss_probability)) {
    ++losses;
    delay += again;
    again *= 2;
  }
  counts_.sent_again += static_cast<uint64_t>(losses);
  if (AreParted(from, to)) {
    ++counts_.held;
    delay += parted_until_ - world_.queue.now() + world_.model.retransmission;
  }
  const bool needs_sender = losses > 0;
  world_.queue.After(
      delay, {.kind = EventKind::kMessage, .node = to},
      [this, from, to, needs_sender, deliver = std::move(deliver)] {
        if (failed_[to] || (needs_sender && failed_[from])) {
          ++counts_.undelivered;
          return;
        }
        deliver();
      });
}

void SimulatedNetwork::Part(const std::vector<uint32_t>& side,
                            absl::Duration time) {
  is_on_side_.assign(is_on_side_.size(), false);
  for (const uint32_t node : side) is_on_side_[node] = true;
  parted_until_ = world_.queue.now() + time;
}

}  // namespace optstate::simulation
