#ifndef OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_
#define OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/io/io_engine.h"
#include "storage/swap_state.h"

namespace optstate::nvme {

// Counts requests by directory. Allocates only in the constructor, in Resize()
// and in all().
//
// Threads: not thread-safe.
class IoCounters {
 public:
  using Clock = std::chrono::steady_clock;

  explicit IoCounters(size_t directories) : directories_(directories) {}

  // Counts for another number of directories from now on; those that stay keep
  // their counts.
  void Resize(size_t directories) { directories_.resize(directories); }
  void OnSubmit(size_t directory) {
    Directory& of = directories_[directory];
    if (of.counters.queue_depth++ == 0) of.busy_since = Clock::now();
  }
  // Counts a request that the engine has returned.
  void OnComplete(size_t directory, const io::IoRequest& request) {
    Directory& of = directories_[directory];
    storage::DirectoryCounters& counters = of.counters;
    if (--counters.queue_depth == 0) {
      counters.busy_ns += NanosSince(of.busy_since);
    }
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

  // Notes that the next pass begins, and the one before it ends.
  void OnPass() {
    for (Directory& of : directories_) {
      const storage::DirectoryPass now = Totals(of);
      of.counters.last_pass = {
          .bytes_read = now.bytes_read - of.before_pass.bytes_read,
          .bytes_written = now.bytes_written - of.before_pass.bytes_written,
          .busy_ns = now.busy_ns - of.before_pass.busy_ns};
      of.before_pass = now;
    }
  }

  std::vector<storage::DirectoryCounters> all() const {
    std::vector<storage::DirectoryCounters> all;
    for (const Directory& of : directories_) {
      all.push_back(of.counters);
      all.back().busy_ns = Totals(of).busy_ns;
    }
    return all;
  }

 private:
  struct Directory {
    storage::DirectoryCounters counters;  // busy_ns: of what has ended
    Clock::time_point busy_since;         // while requests are under way
    storage::DirectoryPass before_pass;   // totals at its beginning
  };

  static uint64_t NanosSince(Clock::time_point begin) {
    return static_cast<uint64_t>(
        std::chrono::nanoseconds(Clock::now() - begin).count());
  }
  static storage::DirectoryPass Totals(const Directory& of) {
    const uint64_t busy_ns =
        of.counters.queue_depth == 0 ? 0 : NanosSince(of.busy_since);
    return {.bytes_read = of.counters.bytes_read,
            .bytes_written = of.counters.bytes_written,
            .busy_ns = of.counters.busy_ns + busy_ns};
  }

  std::vector<Directory> directories_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_IO_COUNTERS_H_
