#ifndef OPTSTATE_STORAGE_IO_BLOCKING_IO_ENGINE_H_
#define OPTSTATE_STORAGE_IO_BLOCKING_IO_ENGINE_H_

#include <memory>

#include "storage/io/io_engine.h"
#include "storage/io/io_engine_options.h"

namespace optstate::io {

// Makes an engine that reads and writes with pread and pwrite, on a few threads
// of its own. It works wherever there are files.
std::unique_ptr<IoEngine> MakeBlockingIoEngine(const IoEngineOptions& options);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_BLOCKING_IO_ENGINE_H_
