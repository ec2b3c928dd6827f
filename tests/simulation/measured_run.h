#ifndef OPTSTATE_TESTS_SIMULATION_MEASURED_RUN_H_
#define OPTSTATE_TESTS_SIMULATION_MEASURED_RUN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "tests/simulation/cluster.h"
#include "tests/simulation/report.h"
#include "tests/simulation/scenarios.h"

namespace optstate::simulation {

// The parts of a run that all scenarios share: a cluster, what it costs, and
// the checks at the end. Threads: one at a time.
class MeasuredRun {
 public:
  static absl::StatusOr<std::unique_ptr<MeasuredRun>> Begin(
      absl::string_view scenario, const ScenarioOptions& options,
      uint32_t spares = 0);

  Cluster& cluster() { return *cluster_; }
  Report& report() { return report_; }

  // Starts ranks on these nodes, and runs until they have ended. An error: they
  // do not end, or one of them has failed.
  absl::Status RunRanks(const std::vector<uint32_t>& nodes,
                        absl::Duration spread, uint64_t last_step);

  // Notes a violation unless it holds.
  void Expect(bool holds, absl::string_view what);
  // Expects each rank of `nodes` to have been told of steps [first, last].
  void ExpectTold(uint64_t first, uint64_t last, uint64_t nodes);
  void Count(absl::string_view name, uint64_t count);

  // Makes the checks that all scenarios share: these nodes are at `step`, with
  // the bits of an undisturbed job, and all ranks were told the same. Returns
  // the report.
  Report End(const std::vector<uint32_t>& nodes, uint64_t step);

 private:
  MeasuredRun() = default;

  Report report_;
  absl::Duration cpu_before_;
  absl::Time began_at_;
  std::unique_ptr<Cluster> cluster_;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_MEASURED_RUN_H_
