#ifndef OPTSTATE_TESTS_SIMULATION_PLOT_H_
#define OPTSTATE_TESTS_SIMULATION_PLOT_H_

#include <string>

#include "absl/types/span.h"
#include "tests/simulation/report.h"

namespace optstate::simulation {

// Returns an SVG that needs nothing else: for each simulation the distribution
// of attach times (the share of ranks that are attached by a time), and of log
// lines (the share of nodes with so many or fewer). Equal reports give equal
// files.
std::string PlotOf(absl::Span<const Report> reports);

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_PLOT_H_
