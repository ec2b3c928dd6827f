#ifndef OPTSTATE_TESTS_LOAD_LOAD_SCENARIO_H_
#define OPTSTATE_TESTS_LOAD_LOAD_SCENARIO_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/load/admin_load.h"
#include "tests/load/cost_sample.h"
#include "tests/load/soak_report.h"
#include "tests/load/stretch.h"

namespace optstate::load {

// Many jobs that step, and operators who ask, in one daemon.
struct LoadOptions {
  uint32_t jobs = 8;
  uint32_t sessions = 32;
  int64_t elements = 16384;  // of a job
  bool grpc = false;         // ranks over gRPC on a unix socket
  absl::Duration step_interval = absl::ZeroDuration();
  double calls_per_second = 0;  // 0: as fast as they are answered
  size_t call_threads = 4;
  size_t channels = 2;
  uint64_t lists_every = 2;  // see AdminLoad
  uint32_t age_max_ms = 0;   // likewise
  // Rounds of four slices each: steps alone, calls alone, calls that do
  // nothing, steps and calls.
  int rounds = 1;
  Stretch steps;  // of each job in a slice
  Stretch calls;  // in a slice
  // In place of the rounds: steps alone, the soak, steps alone. The soak lasts
  // as long as `soak_steps` and `soak_calls` do.
  std::optional<SoakOptions> soak;
  Stretch soak_steps;
  Stretch soak_calls;
};

struct LoadReport {
  CostSample before;   // after a small run, whose jobs are gone
  CostSample opened;   // all ranks attached, nothing under way
  CostSample stepped;  // while jobs step and operators ask
  CostSample after;    // all jobs deleted
  std::vector<double> steps_alone_ms;
  std::vector<double> steps_ms;  // beside calls
  AdminTally calls_alone;
  AdminTally calls_bare;  // AdminLoad::RunBare(), without steps too
  AdminTally calls;       // beside steps
  uint64_t steps = 0;     // of all jobs
  std::optional<SoakReport> soak;

  std::string ToString() const;
};

// Returns RESOURCE_EXHAUSTED, and what to do, when this machine has too little
// memory, or this user too few open files. Raises the limit of open files.
absl::Status CheckResources(const LoadOptions& options);

// Runs it on a daemon of its own, whose limits of jobs and of sessions are just
// what is asked for. An error when a step fails, a job is at another step than
// its ranks were told, one session more is not refused by the limit, or fds and
// engines are not gone when all jobs are deleted. What became of calls is for
// the caller to judge.
absl::StatusOr<LoadReport> RunLoad(const LoadOptions& options);

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_LOAD_SCENARIO_H_
