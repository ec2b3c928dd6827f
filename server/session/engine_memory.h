#ifndef OPTSTATE_SERVER_SESSION_ENGINE_MEMORY_H_
#define OPTSTATE_SERVER_SESSION_ENGINE_MEMORY_H_

#include <cstdint>
#include <string>

#include "optstate/v1/config.pb.h"

namespace optstate::session {

// Returns the bytes of its own, beside the job's files, that an engine takes to
// open the job whose files are below `directory`: its tables, the workspace of
// its workers and the cache of parameters that are on disk, as they are
// admitted when a job is registered. Those that it pins for devices are not
// among them, because devices are looked for by engines alone. 0: the job has
// no layout, or one that cannot be read, which its engine will say.
uint64_t EngineBytesOf(const v1::DaemonConfig& config,
                       const std::string& directory);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_ENGINE_MEMORY_H_
