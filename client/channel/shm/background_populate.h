#ifndef OPTSTATE_CLIENT_CHANNEL_SHM_BACKGROUND_POPULATE_H_
#define OPTSTATE_CLIENT_CHANNEL_SHM_BACKGROUND_POPULATE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/session_types.h"

namespace optstate::client {

// Gives a range its pages, as shm::PopulatePages does.
using PopulateFunction =
    std::function<absl::Status(std::byte* data, uint64_t bytes)>;

// Gives memory its pages on a thread of its own, in ascending order, so that an
// attach does not wait for the kernel to find and clear them. A writer first
// waits for the pages of its part, because a write to a page that cannot be had
// would end the process with SIGBUS. A waiting thread populates pages too.
//
// Threads: thread-safe after Start().
class BackgroundPopulate {
 public:
  // `populate` may be called by several threads at once.
  explicit BackgroundPopulate(PopulateFunction populate);
  BackgroundPopulate(const BackgroundPopulate&) = delete;
  BackgroundPopulate& operator=(const BackgroundPopulate&) = delete;
  // Stops the thread, however far it has come.
  ~BackgroundPopulate();

  // Starts the thread; is called at most once. Where the system gives no
  // thread, the threads that wait populate. `memory` starts at a page boundary
  // and outlives this object.
  void Start(absl::Span<std::byte> memory);

  // Returns whether the first `bytes` have their pages.
  bool Has(uint64_t bytes) const {
    return populated_.load(std::memory_order_acquire) >= bytes;
  }
  // Waits until they have, after Start(). RESOURCE_EXHAUSTED: they do not get
  // them; says what to do. CANCELLED: interrupted.
  absl::Status Await(uint64_t bytes, const InterruptCheck& interrupted)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Populates the next part of the first `bytes` that no thread has begun.
  // False: there is none.
  bool PopulateNext(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for a moment; true: the first `bytes` have their pages, or fail to.
  bool AwaitDecided(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  const PopulateFunction populate_;
  absl::Span<std::byte> memory_;
  std::atomic<uint64_t> populated_ = 0;  // bytes; set with mutex_ held
  absl::Mutex mutex_;
  uint64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;         // bytes
  std::vector<bool> is_done_ ABSL_GUARDED_BY(mutex_);  // by slice
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_SHM_BACKGROUND_POPULATE_H_
