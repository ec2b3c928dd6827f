#ifndef OPTSTATE_SERVER_CONTROL_VERSIONS_H_
#define OPTSTATE_SERVER_CONTROL_VERSIONS_H_

#include <cstdint>

#include "storage/format/control_file.h"

namespace optstate::control {

// Of what supervisor and engine say to each other (optstate/v1/engine.proto).
// An upgraded supervisor adopts engines of the release before it.
inline constexpr uint32_t kControlVersion = 1;

// Of a job's files, as storage/format/FORMAT.md has it: the one that this build
// writes, and the oldest that it reads.
inline constexpr uint32_t kStateFormatVersion = ::optstate::kControlVersion;
inline constexpr uint32_t kStateFormatVersionMin = kStateFormatVersion;

}  // namespace optstate::control

#endif  // OPTSTATE_SERVER_CONTROL_VERSIONS_H_
