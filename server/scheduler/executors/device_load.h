#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_LOAD_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_LOAD_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace optstate::scheduler {

// How fast a device works, counted over the time in which it has work: from a
// batch that is submitted to the end, as the host sees it, of the last one
// under way. So a pass over few elements tells as much as one over many.
//
// Threads: one at a time.
class DeviceLoad {
 public:
  // Passes with work that count in the rates.
  static constexpr size_t kPasses = 16;

  struct Work {
    uint64_t elements = 0;
    uint64_t copied_bytes = 0;
    int64_t busy_ns = 0;

    // Return rates while the device was busy; 0: there was no work.
    double ElementsPerSecond() const;
    double CopiedBytesPerSecond() const;
  };

  // A batch is given to the device.
  void Begin(int64_t now_ns);
  // One of those under way is over, with what was done; 0: it failed.
  void End(int64_t now_ns, uint64_t elements, uint64_t copied_bytes);
  // Lets what was done since the last call count as one pass. No batch is under
  // way.
  void EndPass();

  // Returns the sum of the last passes.
  Work Recent() const;

 private:
  Work pass_;                         // the one that goes on
  std::array<Work, kPasses> passes_;  // a ring
  size_t next_ = 0;
  size_t under_way_ = 0;
  int64_t busy_since_ns_ = 0;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_LOAD_H_
