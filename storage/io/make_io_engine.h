#ifndef OPTSTATE_STORAGE_IO_MAKE_IO_ENGINE_H_
#define OPTSTATE_STORAGE_IO_MAKE_IO_ENGINE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "storage/io/io_engine.h"
#include "storage/io/io_engine_options.h"

namespace optstate::io {

enum class IoEngineKind : uint8_t { kAny, kIoUring, kBlocking };

struct MadeIoEngine {
  std::unique_ptr<IoEngine> engine;
  // A sentence for the log: which feature the engine lacks, and why. Empty when
  // it lacks none.
  std::string without;
};

// Makes the engine of a real disk. With kAny it is io_uring, or the blocking
// one where the machine refuses that; then there is no error. With kIoUring,
// returns the error of MakeIoUringIoEngine().
absl::StatusOr<MadeIoEngine> MakeIoEngine(IoEngineKind kind,
                                          const IoEngineOptions& options);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_MAKE_IO_ENGINE_H_
