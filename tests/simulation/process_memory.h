#ifndef OPTSTATE_TESTS_SIMULATION_PROCESS_MEMORY_H_
#define OPTSTATE_TESTS_SIMULATION_PROCESS_MEMORY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace optstate::simulation {

// Returns the anonymous memory that this process has now (RssAnon of
// /proc/self/status): heap and stacks, without mapped files; 0: not known.
uint64_t AnonymousBytes();

// Returns the time that this process has had a core, in user and kernel mode.
absl::Duration CpuTime();

// Raises the limit of open files, and returns RESOURCE_EXHAUSTED, with what to
// do, when the process may still not have this many files or mappings.
absl::Status ReserveFilesAndMappings(uint64_t files, uint64_t mappings);

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_PROCESS_MEMORY_H_
