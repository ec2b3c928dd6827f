#ifndef OPTSTATE_STORAGE_TESTING_LOCK_LIMIT_H_
#define OPTSTATE_STORAGE_TESTING_LOCK_LIMIT_H_

#include <cstdint>
#include <functional>

namespace optstate::storage {

// Runs a part of a test in a child process that may lock so many bytes of
// memory (RLIMIT_MEMLOCK) and has no capability to ignore that. Returns whether
// nothing in it failed; what failed is printed. Called while the process has
// one thread.
[[nodiscard]] bool PassesWithLockLimit(uint64_t bytes,
                                       const std::function<void()>& part);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TESTING_LOCK_LIMIT_H_
