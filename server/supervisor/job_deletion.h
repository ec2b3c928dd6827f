#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_DELETION_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_DELETION_H_

#include <atomic>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/os/tree_removal.h"

namespace optstate::supervisor {

// The deletion of a job, as those see it who asked for it. It goes on without
// them.
//
// Threads: thread-safe.
class JobDeletion {
 public:
  // Waits until the deletion has ended, `deadline` at most; returns whether it
  // has.
  bool AwaitEnd(absl::Time deadline);
  // Returns how it ended; OK before the end.
  absl::Status status() const;
  v1::DeleteProgress progress() const;

  // The job has no engine any more, and its files are removed from now on.
  void BeginRemoval() { awaits_engine_ = false; }
  os::RemovalProgress& removal() { return removal_; }
  void End(const absl::Status& status);

 private:
  std::atomic<bool> awaits_engine_ = true;
  os::RemovalProgress removal_;
  mutable absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_DELETION_H_
