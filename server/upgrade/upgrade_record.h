#ifndef OPTSTATE_SERVER_UPGRADE_UPGRADE_RECORD_H_
#define OPTSTATE_SERVER_UPGRADE_UPGRADE_RECORD_H_

#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::upgrade {

// The progress of the last upgrade, for any caller.
//
// Threads: thread-safe.
class UpgradeRecord {
 public:
  void Begin(const std::string& id) {
    absl::MutexLock lock(&mutex_);
    progress_.Clear();
    progress_.set_id(id);
  }
  void AddReplaced() {
    absl::MutexLock lock(&mutex_);
    progress_.set_engines_replaced(progress_.engines_replaced() + 1);
  }
  void AddProblem(std::string problem) {
    absl::MutexLock lock(&mutex_);
    progress_.add_problems(std::move(problem));
  }
  void Finish() {
    absl::MutexLock lock(&mutex_);
    progress_.set_done(true);
  }
  // Returns a record with an empty id if there was no upgrade.
  v1::UpgradeProgress Get() const {
    absl::MutexLock lock(&mutex_);
    return progress_;
  }
  bool under_way() const {
    absl::MutexLock lock(&mutex_);
    return !progress_.id().empty() && !progress_.done();
  }

 private:
  mutable absl::Mutex mutex_;
  v1::UpgradeProgress progress_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::upgrade

#endif  // OPTSTATE_SERVER_UPGRADE_UPGRADE_RECORD_H_
