#ifndef OPTSTATE_SERVER_ENGINE_VERSIONS_H_
#define OPTSTATE_SERVER_ENGINE_VERSIONS_H_

#include <cstdint>

#include "storage/format/control_file.h"

namespace optstate::engine {

// Version of the protocol between supervisor and engine
// (optstate/v1/engine.proto). An upgraded supervisor adopts engines of the
// release before it.
inline constexpr uint32_t kControlVersion = 1;

// Versions of a job's files, as storage/format/FORMAT.md defines them: the one
// that this build writes, and the oldest that it reads.
inline constexpr uint32_t kStateFormatVersion = storage::kControlVersion;
inline constexpr uint32_t kStateFormatVersionMin = kStateFormatVersion;

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_VERSIONS_H_
