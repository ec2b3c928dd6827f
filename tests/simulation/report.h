#ifndef OPTSTATE_TESTS_SIMULATION_REPORT_H_
#define OPTSTATE_TESTS_SIMULATION_REPORT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace optstate::simulation {

// The results of one simulation.
struct Report {
  std::string scenario;
  uint64_t seed = 0;
  uint32_t nodes = 0;
  uint32_t ranks = 0;  // of each node

  // Simulated times from the begin of a rank's script until it is attached: of
  // ranks that make their job or find it as they left it, and of ranks that
  // come after others have died.
  std::vector<double> attach_ms;
  std::vector<double> attach_again_ms;
  uint64_t steps = 0;          // committed
  double rounds_per_step = 0;  // all-gathers while ranks take steps
  double simulated_s = 0;
  uint64_t events = 0;

  // Real costs, by node.
  double cpu_ms_per_node = 0;
  uint64_t heap_bytes_per_node = 0;
  uint64_t file_bytes_per_node = 0;
  std::vector<uint64_t> log_lines;  // of each node

  // Further counts of the scenario, by name.
  std::vector<std::pair<std::string, uint64_t>> counts;
  uint64_t trace_hash = 0;
  // Findings of a scenario that must not be; empty: none.
  std::vector<std::string> violations;

  uint64_t CountOf(const std::string& name) const;
  uint64_t log_lines_max() const;
};

// Returns a table with a row for each simulation, then its counts and what is
// wrong with it.
std::string TableOf(absl::Span<const Report> reports);

// Returns the same columns as comma-separated values for plot_costs.py: a line
// of names, then one for each simulation. Times and means are not rounded; a
// scenario without ranks that attach again has nothing there.
std::string CsvOf(absl::Span<const Report> reports);

// Writes a text to a file, anew.
absl::Status WriteText(const std::string& text, const std::string& path);

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_REPORT_H_
