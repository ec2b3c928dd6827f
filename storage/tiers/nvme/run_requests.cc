#include "storage/tiers/nvme/run_requests.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/tiers/nvme/nvme_options.h"

namespace optstate::nvme {

absl::Status RunRequests(io::IoEngine* engine,
                         absl::Span<io::IoRequest> requests) {
  for (io::IoRequest& request : requests) engine->Submit(&request);
  std::vector<uint8_t> attempts(requests.size(), 1);
  absl::Status status;
  size_t left = requests.size();
  while (left > 0) {
    io::IoRequest* done = nullptr;
    if (engine->Poll({&done, 1}, /*wait=*/true) == 0) continue;
    const auto i = static_cast<size_t>(done - requests.data());
    if (!done->status.ok() && done->kind == io::IoRequest::Kind::kRead &&
        attempts[i]++ < kNvmeReadAttemptsMax) {
      engine->Submit(done);
      continue;
    }
    status.Update(done->status);
    --left;
  }
  return status;
}

}  // namespace optstate::nvme
