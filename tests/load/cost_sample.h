#ifndef OPTSTATE_TESTS_LOAD_COST_SAMPLE_H_
#define OPTSTATE_TESTS_LOAD_COST_SAMPLE_H_

#include <string>

#include "tests/load/process_costs.h"

namespace optstate::load {

// Costs of supervisor, engines and this process, which has all ranks.
struct CostSample {
  ProcessCosts supervisor;
  ProcessCosts engines;
  ProcessCosts ranks;

  std::string ToString() const;
};

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_COST_SAMPLE_H_
