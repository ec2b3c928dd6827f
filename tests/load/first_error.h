#ifndef OPTSTATE_TESTS_LOAD_FIRST_ERROR_H_
#define OPTSTATE_TESTS_LOAD_FIRST_ERROR_H_

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace optstate::load {

// Keeps the first error of several threads, which end when there is one.
//
// Threads: thread-safe.
class FirstError {
 public:
  void Note(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    first_.Update(status);
  }
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return first_;
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Status first_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_FIRST_ERROR_H_
