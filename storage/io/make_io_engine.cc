#include "storage/io/make_io_engine.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/io/blocking_io_engine.h"
#include "storage/io/io_uring_io_engine.h"

namespace optstate::io {

absl::StatusOr<MadeIoEngine> MakeIoEngine(IoEngineKind kind,
                                          const IoEngineOptions& options) {
  MadeIoEngine made;
  if (kind != IoEngineKind::kBlocking) {
    absl::StatusOr<std::unique_ptr<IoEngine>> engine =
        MakeIoUringIoEngine(options);
    if (engine.ok()) {
      made.engine = *std::move(engine);
      return made;
    }
    if (kind == IoEngineKind::kIoUring) return engine.status();
    made.without =
        absl::StrCat("Disk I/O works without io_uring, on ", options.threads,
                     " blocking threads: ", engine.status().message());
  }
  made.engine = MakeBlockingIoEngine(options);
  return made;
}

}  // namespace optstate::io
