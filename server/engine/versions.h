#ifndef OPTSTATE_SERVER_ENGINE_VERSIONS_H_
#define OPTSTATE_SERVER_ENGINE_VERSIONS_H_

#include <cstdint>

#include "storage/format/control_file.h"

namespace optstate::engine {

// Version of the protocol between supervisor and engine
// (optstate/v1/engine.proto), and the oldest that this build speaks. An
// upgraded supervisor adopts engines of the release before it, and an engine
// answers a supervisor of that release in its version: each speaks the lower
// one.
inline constexpr uint32_t kControlVersion = 2;
inline constexpr uint32_t kControlVersionMin = 1;
// The first version whose supervisors know EngineEvent.RankLost.
inline constexpr uint32_t kControlVersionOfRankLost = 2;

// Versions of a job's files, as storage/format/FORMAT.md defines them: the one
// that this build writes, and the oldest that it reads.
inline constexpr uint32_t kStateFormatVersion = storage::kControlVersion;
inline constexpr uint32_t kStateFormatVersionMin = kStateFormatVersion;

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_VERSIONS_H_
