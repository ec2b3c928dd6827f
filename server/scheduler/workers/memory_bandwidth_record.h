#ifndef OPTSTATE_SERVER_SCHEDULER_WORKERS_MEMORY_BANDWIDTH_RECORD_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKERS_MEMORY_BANDWIDTH_RECORD_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace optstate::scheduler {

// The file STATE_DIR/memory_bandwidth records the memory's bandwidth, in bytes
// per second: the daemon has it measured once, and engines look it up when they
// are asked about their job.

// Returns the recorded bandwidth; 0: it is not known (yet).
double RecordedMemoryBandwidth(const std::string& state_dir);

// Remembers it for one who asks often, and reads the file again when that is
// another one.
//
// Threads: thread-safe.
class MemoryBandwidthReader {
 public:
  explicit MemoryBandwidthReader(const std::string& state_dir);

  double bytes_per_s();

 private:
  const std::string state_dir_;
  std::mutex mutex_;
  // Identify the file that was read: each is written anew and renamed.
  uint64_t inode_ = 0;
  int64_t written_at_ns_ = 0;
  double bytes_per_s_ = 0;
};

// Calls `measure` and records what it gives, on a thread of its own, unless
// there is a record for this number of workers already. It begins after
// `delay`: processes that start with the daemon should not have to share the
// cores with it, and a short-lived daemon should not begin.
class MemoryBandwidthMeter {
 public:
  using Measure =
      std::function<double(int workers, const std::atomic<bool>& stop)>;

  static constexpr std::chrono::milliseconds kDelay{1000};

  MemoryBandwidthMeter(const std::string& state_dir, int workers,
                       Measure measure,
                       std::chrono::milliseconds delay = kDelay);
  MemoryBandwidthMeter(const MemoryBandwidthMeter&) = delete;
  MemoryBandwidthMeter& operator=(const MemoryBandwidthMeter&) = delete;
  // Stops the measurement.
  ~MemoryBandwidthMeter();

 private:
  void AwaitStart(std::chrono::milliseconds delay) const;

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKERS_MEMORY_BANDWIDTH_RECORD_H_
