#ifndef OPTSTATE_SERVER_SESSION_JOB_LOCK_H_
#define OPTSTATE_SERVER_SESSION_JOB_LOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace optstate {

// The lock of a job. A pass over the job's state, which takes as long as the
// state is large, is made without the mutex and with the job in the state
// "applying":
//
//   idle -> applying -> idle    MakePass()
//
// Calls that need the job's state wait until it is idle (JobCall). Calls that
// only look at what no pass changes, as operators' do, take the mutex alone,
// and so never wait for a step.
class JobLock {
 public:
  // Makes the pass without the mutex, and returns its result. The caller holds
  // the mutex before and after; the job must be idle.
  absl::Status MakePass(absl::FunctionRef<absl::Status()> pass)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  bool is_idle() const { return !applying_; }
  // Waits, giving the mutex up meanwhile, until no pass is being made.
  void AwaitIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  mutable absl::Mutex mu;

 private:
  bool applying_ = false;  // guarded by mu
};

// Holds the lock of an idle job.
class ABSL_SCOPED_LOCKABLE JobCall {
 public:
  explicit JobCall(JobLock* lock) ABSL_EXCLUSIVE_LOCK_FUNCTION(lock->mu)
      : lock_(lock) {
    lock_->mu.Lock();
    lock_->AwaitIdle();
  }
  ~JobCall() ABSL_UNLOCK_FUNCTION() { lock_->mu.Unlock(); }
  JobCall(const JobCall&) = delete;
  JobCall& operator=(const JobCall&) = delete;

 private:
  JobLock* const lock_;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_JOB_LOCK_H_
