#ifndef OPTSTATE_SERVER_TRANSPORT_SHM_SPIN_POLICY_H_
#define OPTSTATE_SERVER_TRANSPORT_SHM_SPIN_POLICY_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"
#include "optstate/v1/config.pb.h"

namespace optstate::transport {

// Decides how long a session's thread may spin for the next submission.
//
// Spinning saves the 40 us of a wake-up, and costs another thread's time slice
// when cores are short. Every session needs a core for its thread and one for
// the rank that it serves; update threads count when their number was chosen
// (by default they are as many as there are cores, and idle when sessions
// spin).
//
// Threads: thread-safe.
class SpinPolicy {
 public:
  explicit SpinPolicy(const v1::EngineSettings& settings);
  // Constructs a policy for a given number of cores, for tests.
  SpinPolicy(const v1::EngineSettings& settings, uint32_t cores);

  void AddSession() { sessions_.fetch_add(1, std::memory_order_relaxed); }
  void RemoveSession() { sessions_.fetch_sub(1, std::memory_order_relaxed); }

  absl::Duration Spin() const {
    const uint32_t sessions = sessions_.load(std::memory_order_relaxed);
    return 2 * sessions + workers_ <= cores_ ? spin_ : absl::ZeroDuration();
  }

 private:
  const absl::Duration spin_;
  const uint32_t workers_;
  const uint32_t cores_;
  std::atomic<uint32_t> sessions_{0};
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SHM_SPIN_POLICY_H_
