#ifndef OPTSTATE_STORAGE_TIERS_NVME_STORE_COUNTERS_H_
#define OPTSTATE_STORAGE_TIERS_NVME_STORE_COUNTERS_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace optstate::nvme {

// The counters of one pass: NvmeStore::PassCounters.
struct NvmePassCounters {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t cpu_ns = 0;
};

// Counts the store's work since it was opened.
struct NvmeCounters {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t records_read = 0;
  uint64_t records_written = 0;
  uint64_t commits = 0;
  uint64_t passes = 0;  // begun
  // CPU time of the thread of I/O, and of checksums on the threads that use
  // the store. Threads of a blocking engine, or of the kernel, are not in it.
  uint64_t cpu_ns = 0;
  // From the beginning of the pass before the present one to its end, which
  // is the beginning of this one.
  NvmePassCounters last_pass;
};

// Counts what the store does, by records and passes.
//
// Threads: not thread-safe; the store's lock is held.
class StoreCounters {
 public:
  // Adds the CPU time of the calling thread between its beginning and its end
  // to that of the threads that use the store.
  class CallerTimer {
   public:
    explicit CallerTimer(StoreCounters* counters);
    CallerTimer(const CallerTimer&) = delete;
    CallerTimer& operator=(const CallerTimer&) = delete;
    ~CallerTimer();

   private:
    StoreCounters& counters_;
    const uint64_t begin_ns_;
  };

  void OnRead(uint64_t bytes) {
    counters_.bytes_read += bytes;
    ++counters_.records_read;
  }
  void OnWrite(uint64_t bytes) {
    counters_.bytes_written += bytes;
    ++counters_.records_written;
  }
  void OnCommit() { ++counters_.commits; }
  void OnPass();
  // Counts the CPU time of the calling thread, from its beginning on, as that
  // of the thread of I/O.
  void SetIoThread();
  // Keeps the time of that thread, which is the calling one and ends.
  void EndIoThread();

  NvmeCounters all() const;

 private:
  NvmePassCounters Totals() const;

  NvmeCounters counters_;
  NvmePassCounters before_pass_;
  uint64_t callers_cpu_ns_ = 0;
  uint64_t ended_cpu_ns_ = 0;  // of threads of I/O that have ended
  std::optional<clockid_t> io_clock_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_STORE_COUNTERS_H_
