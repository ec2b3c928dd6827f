#ifndef OPTSTATE_TESTS_CRASH_CRASH_ROUND_H_
#define OPTSTATE_TESTS_CRASH_CRASH_ROUND_H_

#include <random>

#include "absl/status/status.h"
#include "tests/crash/running_job.h"
#include "tests/crash/scenario.h"
#include "tests/crash/tally.h"

namespace optstate::crash {

// Runs one job on a daemon of its own through a scenario and disturbs it, until
// it ends. DATA_LOSS when a bit of its state or of its parameters is not that
// of an undisturbed run; other errors when a process did not go on, or had to
// run a step again although nothing was lost. They end with what the daemon and
// the engines said.
absl::Status RunRound(Wire wire, const Scenario& scenario, const Quota& quota,
                      std::mt19937_64* random, Tally* tally);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_CRASH_ROUND_H_
