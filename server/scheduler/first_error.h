#ifndef OPTSTATE_SERVER_SCHEDULER_FIRST_ERROR_H_
#define OPTSTATE_SERVER_SCHEDULER_FIRST_ERROR_H_

#include <atomic>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace optstate::scheduler {

// Keeps the first error of the bodies of a ParallelFor(). Thread-safe.
class FirstError {
 public:
  void Note(const absl::Status& status) {
    if (status.ok()) return;
    const absl::MutexLock lock(&mu_);
    status_.Update(status);
    failed_.store(true, std::memory_order_relaxed);
  }
  // Says whether the bodies that have not begun can be left out.
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  // Returns the error after the bodies; takes no lock when there is none.
  absl::Status status() const {
    if (!failed()) return absl::OkStatus();
    const absl::MutexLock lock(&mu_);
    return status_;
  }

 private:
  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::atomic<bool> failed_{false};
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_FIRST_ERROR_H_
