#ifndef OPTSTATE_TESTS_SIMULATION_MODEL_H_
#define OPTSTATE_TESTS_SIMULATION_MODEL_H_

#include <cstdint>

#include "absl/time/time.h"

namespace optstate::simulation {

// A duration that is drawn: evenly in [least, most), and one time in
// `tail_one_in` ten times that.
struct DrawnTime {
  absl::Duration least;
  absl::Duration most;
  uint32_t tail_one_in = 0;  // 0: never
};

// Costs in the simulated world. All of them are assumed, not measured:
// simulated times compare one run with another, and say nothing about a real
// machine.
struct Model {
  // A message between two machines, without its bytes.
  DrawnTime network = {absl::Microseconds(20), absl::Microseconds(80), 200};
  double network_bytes_per_s = 1e9;
  // The odds that a message is lost once; it is sent again after this time, and
  // after twice as much each time that it is lost again.
  double loss_probability = 1e-4;
  absl::Duration retransmission = absl::Milliseconds(200);
  // From one process to another one on its machine.
  DrawnTime local = {absl::Microseconds(50), absl::Microseconds(150), 500};
  // The supervisor's loop with one Hello. One at a time.
  DrawnTime hello = {absl::Microseconds(100), absl::Microseconds(400), 100};
  // That loop when it looks for sessions that have ended.
  DrawnTime look = {absl::Milliseconds(1), absl::Milliseconds(3)};
  // The start of an engine until it has opened its job.
  DrawnTime engine_start = {absl::Milliseconds(20), absl::Milliseconds(60), 50};
  // The engine with the registration and attachment of one rank. One at a time.
  DrawnTime attach = {absl::Microseconds(200), absl::Microseconds(600), 100};
  // The engine with the preparation of a step, and with its update.
  DrawnTime step_part = {absl::Microseconds(300), absl::Milliseconds(1), 200};
  // Forward and backward of one rank.
  DrawnTime compute = {absl::Milliseconds(180), absl::Milliseconds(220)};
  // From the launcher's start of a process until its script constructs the
  // optimizer.
  DrawnTime process_start = {absl::Milliseconds(500), absl::Milliseconds(1500)};
  // From the loss of a machine until a peer's transport gives it up.
  DrawnTime loss_notice = {absl::Seconds(1), absl::Seconds(3)};
  // From the end of the last process until the launcher starts others.
  absl::Duration rendezvous = absl::Seconds(2);
  // An operator who cannot pause a job tries again so often, and so long.
  absl::Duration pause_retry = absl::Milliseconds(5);
  absl::Duration pause_patience = absl::Milliseconds(60);
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_MODEL_H_
