#ifndef OPTSTATE_TESTS_SIMULATION_WORLD_H_
#define OPTSTATE_TESTS_SIMULATION_WORLD_H_

#include <cstdint>

#include "absl/time/time.h"
#include "tests/simulation/event_queue.h"
#include "tests/simulation/model.h"
#include "tests/simulation/seeded_draw.h"
#include "tests/simulation/simulated_clock.h"
#include "tests/simulation/trace.h"

namespace optstate::simulation {

// The time, the events and the chance that all parts of a simulation share.
struct World {
  World(uint64_t seed, const Model& assumed)
      : model(assumed), draw(seed), queue(&clock, &trace) {}
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  absl::Duration Draw(const DrawnTime& time) {
    const absl::Duration drawn = draw.Between(time.least, time.most);
    const bool is_tail =
        time.tail_one_in != 0 && draw.Below(time.tail_one_in) == 0;
    return is_tail ? 10 * drawn : drawn;
  }

  const Model model;
  SimulatedClock clock;
  Trace trace;
  SeededDraw draw;
  EventQueue queue;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_WORLD_H_
