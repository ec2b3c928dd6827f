#ifndef OPTSTATE_STORAGE_IO_IO_URING_IO_ENGINE_H_
#define OPTSTATE_STORAGE_IO_IO_URING_IO_ENGINE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "storage/io/io_engine.h"
#include "storage/io/io_engine_options.h"

namespace optstate::io {

// Makes an engine that gives requests to io_uring. An error has the code and
// text of the errno, and names a likely cause: PERMISSION_DENIED (EPERM: a
// seccomp filter or kernel.io_uring_disabled), UNIMPLEMENTED (ENOSYS: the
// kernel is older than 5.6), RESOURCE_EXHAUSTED (ENOMEM: RLIMIT_MEMLOCK).
//
// Registered memory is pinned by the kernel for as long as the engine lives, so
// that no request looks up its pages. All of its blocks have to be there, and
// RLIMIT_MEMLOCK or CAP_IPC_LOCK has to allow it; otherwise requests work
// without, and Options::log says so.
absl::StatusOr<std::unique_ptr<IoEngine>> MakeIoUringIoEngine(
    const IoEngineOptions& options);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_IO_URING_IO_ENGINE_H_
