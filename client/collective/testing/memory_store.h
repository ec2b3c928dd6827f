#ifndef OPTSTATE_CLIENT_COLLECTIVE_TESTING_MEMORY_STORE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TESTING_MEMORY_STORE_H_

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/collective/store/store.h"

namespace optstate::client {

// A store for ranks that are threads of one process.
//
// Threads: thread-safe.
class MemoryStore final : public Store {
 public:
  absl::Status Set(absl::string_view key, absl::string_view value) override
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (!values_.emplace(std::string(key), std::string(value)).second) {
      return absl::AlreadyExistsError("the key was set before");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(absl::string_view key,
                                  absl::Time deadline) override
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const std::string wanted(key);
    const auto is_set = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return values_.count(wanted) > 0;
    };
    if (!mutex_.AwaitWithDeadline(absl::Condition(&is_set), deadline)) {
      return absl::DeadlineExceededError("no rank has set the key in time");
    }
    return values_.at(wanted);
  }

 private:
  absl::Mutex mutex_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TESTING_MEMORY_STORE_H_
