#ifndef OPTSTATE_STORAGE_IO_SHARED_IO_ENGINE_H_
#define OPTSTATE_STORAGE_IO_SHARED_IO_ENGINE_H_

#include <memory>

#include "storage/io/disk_share.h"
#include "storage/io/io_engine.h"

namespace optstate::io {

// Returns an engine that gives `engine` no more bytes at once than this
// process's part of the disks: a disk that takes requests in turn serves each
// process in proportion to what it has under way. Requests that have to wait
// do so here, the most urgent first; at least one is always under way. While no
// other process has requests, all pass at once.
std::unique_ptr<IoEngine> ShareIoEngine(std::unique_ptr<IoEngine> engine,
                                        std::unique_ptr<DiskShare> share);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_SHARED_IO_ENGINE_H_
