#ifndef OPTSTATE_PROTO_TYPES_MEMORY_AVAILABLE_H_
#define OPTSTATE_PROTO_TYPES_MEMORY_AVAILABLE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace optstate {

// Returns the number of bytes that this process can still take before memory is
// swapped or a process is killed: the minimum of the machine's MemAvailable and
// the rest of the limit of each memory cgroup that holds the process (v1 or v2,
// up to the root). Page cache counts as available. This is a snapshot, not a
// reservation: a later allocation can still fail.
absl::StatusOr<uint64_t> AvailableMemoryBytes();

// Does the same below another root than "/", so that tests can supply the
// files.
absl::StatusOr<uint64_t> AvailableMemoryBytesBelow(const std::string& root);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_MEMORY_AVAILABLE_H_
