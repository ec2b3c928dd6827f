#ifndef OPTSTATE_STORAGE_TIERS_NVME_STORE_COUNTERS_H_
#define OPTSTATE_STORAGE_TIERS_NVME_STORE_COUNTERS_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "storage/swap_state.h"

namespace optstate::nvme {

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

  StoreCounters();

  void OnRead(uint64_t bytes) {
    counters_.bytes_read += bytes;
    ++counters_.records_read;
  }
  void OnWrite(uint64_t bytes) {
    counters_.bytes_written += bytes;
    ++counters_.records_written;
  }
  void OnSectionRead(uint64_t bytes) { counters_.bytes_read += bytes; }
  void OnCommit() { ++counters_.commits; }
  void OnPass();
  // Counts the time in which some thread waits for a record of a pass: each
  // calls these two around it.
  void BeginWait();
  void EndWait();
  uint64_t waited_ns() const;
  // Counts the CPU time of the calling thread, from its beginning on, as that
  // of the thread of I/O.
  void SetIoThread();
  // Keeps the time of that thread, which is the calling one and ends.
  void EndIoThread();

  storage::SwapCounters all() const;

 private:
  storage::PassCounters Totals() const;

  storage::SwapCounters counters_;
  storage::PassCounters before_pass_;
  uint64_t callers_cpu_ns_ = 0;
  const uint64_t opened_ns_;
  uint64_t waited_ns_ = 0;
  uint64_t waiting_since_ns_ = 0;
  uint32_t waiting_ = 0;       // threads
  uint64_t ended_cpu_ns_ = 0;  // of threads of I/O that have ended
  std::optional<clockid_t> io_clock_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_STORE_COUNTERS_H_
