#ifndef OPTSTATE_TESTS_SIMULATION_STEP_BOOK_H_
#define OPTSTATE_TESTS_SIMULATION_STEP_BOOK_H_

#include <cstdint>
#include <map>
#include <string>

#include "proto/types/step_outcome.h"
#include "tests/simulation/trace.h"

namespace optstate::simulation {

// The outcomes that ranks are told of each step: all must be told the same.
class StepBook {
 public:
  // `trace` outlives the book.
  explicit StepBook(Trace* trace) : trace_(*trace) {}

  void Note(uint32_t node, uint32_t rank, const StepOutcome& outcome);

  // Names the first step about which two ranks were told different things, or
  // another thing than the script asked for; empty: there is none.
  const std::string& first_difference() const { return first_difference_; }
  // The number of ranks that were told of the step.
  uint64_t told(uint64_t step) const;
  // The last step of which a rank was told.
  uint64_t last_step() const {
    return told_.empty() ? 0 : told_.rbegin()->first;
  }

 private:
  struct Told {
    StepOutcome outcome;
    uint32_t node = 0;
    uint32_t rank = 0;
    uint64_t ranks = 0;
  };

  Trace& trace_;
  std::map<uint64_t, Told> told_;  // by step
  std::string first_difference_;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_STEP_BOOK_H_
