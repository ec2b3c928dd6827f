#ifndef OPTSTATE_SERVER_SESSION_JOB_LOCK_H_
#define OPTSTATE_SERVER_SESSION_JOB_LOCK_H_

#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace optstate::session {

// The lock of a job. A pass over the job's state, which takes as long as the
// state is large, is made without the mutex and with the job in the state
// "applying":
//
//   idle -> applying -> idle    MakePass()
//
// Calls that need the job's state wait until it is idle (JobCall), or leave
// their work to the call that makes the pass (CallWhenIdle). Calls that
// only look at what no pass changes, as operators' do, take the mutex alone,
// and so never wait for a step. Only a JobCall, or work given to CallWhenIdle,
// makes passes: each does, at its end, what was left to it meanwhile.
class JobLock {
 public:
  // Makes the pass without the mutex, and returns its result. The caller holds
  // the mutex before and after; the job must be idle.
  absl::Status MakePass(absl::FunctionRef<absl::Status()> pass)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Calls `work`, which takes long and is no pass, without the mutex and with
  // the job idle, so that other calls use the job meanwhile. The caller holds
  // the mutex before and after, with the job idle: what it knew of the job may
  // have changed.
  void WorkBeside(absl::FunctionRef<void()> work)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  bool is_idle() const { return !applying_; }
  // Waits, giving the mutex up meanwhile, until no pass is being made.
  void AwaitIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Calls `work` on the idle job: at once, or, while a pass is being made, when
  // the call that makes it ends, so that this caller never waits. Work that
  // makes a pass itself is followed by what other threads left meanwhile.
  void CallWhenIdle(std::function<void()> work)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  mutable absl::Mutex mu;

 private:
  friend class JobCall;

  void DoLeftWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  bool applying_ = false;                         // guarded by mu
  std::vector<std::function<void()>> left_work_;  // guarded by mu
};

// Holds the lock of an idle job.
class ABSL_SCOPED_LOCKABLE JobCall {
 public:
  explicit JobCall(JobLock* lock) ABSL_EXCLUSIVE_LOCK_FUNCTION(lock->mu)
      : lock_(lock) {
    lock_->mu.Lock();
    lock_->AwaitIdle();
  }
  ~JobCall() ABSL_UNLOCK_FUNCTION() {
    lock_->DoLeftWork();
    lock_->mu.Unlock();
  }
  JobCall(const JobCall&) = delete;
  JobCall& operator=(const JobCall&) = delete;

 private:
  JobLock* const lock_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_LOCK_H_
