#ifndef OPTSTATE_TESTS_BENCHMARKS_BENCHMARK_DAEMON_H_
#define OPTSTATE_TESTS_BENCHMARKS_BENCHMARK_DAEMON_H_

#include "tests/integration/daemon_fixture.h"

namespace optstate {

// Returns the daemon that a benchmark's jobs are in, started when it is first
// asked for. Ends the process, saying why, when the daemon does not start.
TestDaemon& Daemon();

}  // namespace optstate

#endif  // OPTSTATE_TESTS_BENCHMARKS_BENCHMARK_DAEMON_H_
