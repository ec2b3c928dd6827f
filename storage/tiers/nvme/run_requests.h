#ifndef OPTSTATE_STORAGE_TIERS_NVME_RUN_REQUESTS_H_
#define OPTSTATE_STORAGE_TIERS_NVME_RUN_REQUESTS_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/io/io_engine.h"

namespace optstate::nvme {

// Runs requests side by side to their end, on an engine that has no others.
// Reads that fail are tried again. Returns the first error that is left.
absl::Status RunRequests(io::IoEngine* engine,
                         absl::Span<io::IoRequest> requests);

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_RUN_REQUESTS_H_
