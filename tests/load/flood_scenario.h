#ifndef OPTSTATE_TESTS_LOAD_FLOOD_SCENARIO_H_
#define OPTSTATE_TESTS_LOAD_FLOOD_SCENARIO_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/load/flood.h"

namespace optstate::load {

// One user's job that steps while another user floods the daemon.
struct FloodOptions {
  int64_t elements = 1 << 20;  // of the job
  uint64_t seed = 0;
  size_t threads = 2;  // of the flood
  // Each slice takes so long; the flood of a test has a number of rounds
  // instead, and the slice ends with it.
  absl::Duration slice = absl::Seconds(2);
  uint64_t flood_rounds = 0;  // of each of its threads; 0: as long as `slice`
  // Slices of three kinds in turn: calm; beside a process of the other user
  // that only uses the cores, which a test leaves out; beside the flood.
  int rounds = 1;
  bool spins = true;
};

struct FloodReport {
  std::vector<double> calm_ms;  // the times of steps
  std::vector<double> spin_ms;  // as many cores used as by the flood
  std::vector<double> flood_ms;
  FloodCounts counts;
  uint64_t steps = 0;
  size_t jobs_of_flood_max = 0;  // that the other user was seen to have

  // Sums up counts whose names begin with `what`.
  uint64_t CountOf(const std::string& what) const;
  std::string ToString() const;
};

// How many jobs the flooding user may have.
inline constexpr uint32_t kFloodJobsMax = 3;

// Runs it on a daemon of its own. An error when this process cannot start one
// of another user (see CheckMayFlood()), a step failed, an operator
// got no answer, the other user got more than the limits allow, or what the
// flood opened is not gone when its jobs are deleted.
absl::StatusOr<FloodReport> RunFlood(const FloodOptions& options);

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_FLOOD_SCENARIO_H_
