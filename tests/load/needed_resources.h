#ifndef OPTSTATE_TESTS_LOAD_NEEDED_RESOURCES_H_
#define OPTSTATE_TESTS_LOAD_NEEDED_RESOURCES_H_

#include <cstdint>

#include "absl/status/status.h"

namespace optstate::load {

// Raises the limit of open files of this process, and of the processes that it
// starts from then on, as far as it may. RESOURCE_EXHAUSTED, with what to do,
// when that is below `needed`.
absl::Status RaiseOpenFiles(uint64_t needed);

// Returns RESOURCE_EXHAUSTED when the machine has less than `needed` bytes of
// memory left.
absl::Status CheckMemory(uint64_t needed);

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_NEEDED_RESOURCES_H_
