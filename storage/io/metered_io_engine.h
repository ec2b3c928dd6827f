#ifndef OPTSTATE_STORAGE_IO_METERED_IO_ENGINE_H_
#define OPTSTATE_STORAGE_IO_METERED_IO_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "storage/io/io_engine.h"

namespace optstate::io {

// Returns an engine that passes all calls to `engine` and adds the bytes of
// each read and write that succeeded to `*done_bytes`, which outlives it. Other
// threads may read the counter meanwhile, to see that work goes on.
std::unique_ptr<IoEngine> MeterIoEngine(std::unique_ptr<IoEngine> engine,
                                        std::atomic<uint64_t>* done_bytes);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_METERED_IO_ENGINE_H_
