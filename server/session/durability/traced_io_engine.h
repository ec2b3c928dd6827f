#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_TRACED_IO_ENGINE_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_TRACED_IO_ENGINE_H_

#include <memory>

#include "optstate/v1/config.pb.h"
#include "server/observe/trace_recorder.h"
#include "storage/io/io_engine.h"

namespace optstate::session {

// Returns an engine that passes all calls to `engine`, and records each read,
// write and sync in a trace: from the moment that the engine is given it to the
// one at which the engine returns it. Lanes are those of the directories that
// the configuration names; other files have those of their folder. `trace`
// outlives the engine.
std::unique_ptr<io::IoEngine> TraceIoEngine(
    std::unique_ptr<io::IoEngine> engine, const v1::NvmeSettings& nvme,
    observe::TraceRecorder* trace);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_TRACED_IO_ENGINE_H_
