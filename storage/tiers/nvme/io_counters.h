#ifndef OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_
#define OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/io/io_engine.h"
#include "storage/swap_state.h"

namespace optstate::nvme {

// Counts requests by directory. Allocates only in the constructor and in
// Resize().
//
// Threads: not thread-safe.
class IoCounters {
 public:
  explicit IoCounters(size_t directories) : directories_(directories) {}

  // Counts for another number of directories from now on; those that stay keep
  // their counts.
  void Resize(size_t directories) { directories_.resize(directories); }
  void OnSubmit(size_t directory) { ++directories_[directory].queue_depth; }
  // Counts a request that the engine has returned.
  void OnComplete(size_t directory, const io::IoRequest& request) {
    storage::DirectoryCounters& counters = directories_[directory];
    --counters.queue_depth;
    if (!request.status.ok()) {
      ++counters.errors;
      return;
    }
    switch (request.kind) {
      case io::IoRequest::Kind::kRead:
        ++counters.reads;
        counters.bytes_read += request.buffer.size();
        break;
      case io::IoRequest::Kind::kWrite:
        ++counters.writes;
        counters.bytes_written += request.buffer.size();
        break;
      case io::IoRequest::Kind::kSync:
        ++counters.syncs;
        break;
    }
  }

  const std::vector<storage::DirectoryCounters>& all() const {
    return directories_;
  }

 private:
  std::vector<storage::DirectoryCounters> directories_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_
