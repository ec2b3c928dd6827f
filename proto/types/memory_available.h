#ifndef OPTSTATE_PROTO_TYPES_MEMORY_AVAILABLE_H_
#define OPTSTATE_PROTO_TYPES_MEMORY_AVAILABLE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace optstate {

// Bytes that this process can still take before something is swapped or killed:
// the least of the machine's MemAvailable and what each memory cgroup that
// holds the process (v1 or v2, up to the root) leaves of its limit. Page cache
// counts as available. A snapshot, not a reservation: whoever takes memory
// after asking must still expect a refusal.
absl::StatusOr<uint64_t> AvailableMemoryBytes();

// The same below another root than "/", so that tests can supply the files.
absl::StatusOr<uint64_t> AvailableMemoryBytesBelow(const std::string& root);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_MEMORY_AVAILABLE_H_
