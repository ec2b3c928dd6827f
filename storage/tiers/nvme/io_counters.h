#ifndef OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_
#define OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/io/io_engine.h"

namespace optstate::nvme {

// Counts the requests to the files of one directory since the store was opened.
// Bytes and operations are those that succeeded.
struct DirectoryCounters {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t reads = 0;
  uint64_t writes = 0;
  uint64_t syncs = 0;
  uint64_t errors = 0;       // each attempt of a read by itself
  uint64_t queue_depth = 0;  // requests that are under way now
};

// Counts requests by directory. Allocates only in the constructor.
//
// Threads: not thread-safe.
class IoCounters {
 public:
  explicit IoCounters(size_t directories) : directories_(directories) {}

  void OnSubmit(size_t directory) { ++directories_[directory].queue_depth; }
  // Counts a request that the engine has returned.
  void OnComplete(size_t directory, const io::IoRequest& request) {
    DirectoryCounters& counters = directories_[directory];
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

  const std::vector<DirectoryCounters>& all() const { return directories_; }

 private:
  std::vector<DirectoryCounters> directories_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_
