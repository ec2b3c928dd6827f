#include "server/session/job_lock.h"

namespace optstate {

absl::Status JobLock::MakePass(absl::FunctionRef<absl::Status()> pass) {
  applying_ = true;
  mu.Unlock();
  absl::Status status = pass();
  mu.Lock();
  applying_ = false;
  return status;
}

void JobLock::AwaitIdle() {
  if (is_idle()) return;
  mu.Await(absl::Condition(this, &JobLock::is_idle));
}

}  // namespace optstate
