#ifndef OPTSTATE_STORAGE_IO_SIMULATED_IO_ENGINE_H_
#define OPTSTATE_STORAGE_IO_SIMULATED_IO_ENGINE_H_

#include <memory>

#include "storage/io/io_engine.h"
#include "storage/io/io_hook.h"
#include "storage/io/simulated_disk.h"

namespace optstate::io {

// Makes an engine on a simulated disk, which outlives it. Time is the disk's
// own: a Poll() that waits goes to the end of the next call, any other lets a
// little time pass. So nothing ever waits, and what happens depends only on
// the disk's seed and the calls. Destroying the engine ends the calls that are
// under way; other deaths are SimulatedDisk::Crash() and AfterKill().
std::unique_ptr<IoEngine> MakeSimulatedIoEngine(SimulatedDisk* disk,
                                                int queue_depth = 64,
                                                IoHook* hook = nullptr);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_SIMULATED_IO_ENGINE_H_
