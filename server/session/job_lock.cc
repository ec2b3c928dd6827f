#include "server/session/job_lock.h"

#include <utility>

namespace optstate::session {

absl::Status JobLock::MakePass(absl::FunctionRef<absl::Status()> pass) {
  applying_ = true;
  mu.Unlock();
  absl::Status status = pass();
  mu.Lock();
  applying_ = false;
  return status;
}

void JobLock::WorkBeside(absl::FunctionRef<void()> work) {
  mu.Unlock();
  work();
  mu.Lock();
  AwaitIdle();
}

void JobLock::AwaitIdle() {
  if (is_idle()) return;
  mu.Await(absl::Condition(this, &JobLock::is_idle));
}

// A caller that is no JobCall may have made a pass in its work, to which other
// threads left theirs.
void JobLock::CallWhenIdle(std::function<void()> work) {
  left_work_.push_back(std::move(work));
  if (is_idle()) DoLeftWork();
}

// More may be left while this work makes a pass.
void JobLock::DoLeftWork() {
  while (!left_work_.empty()) {
    for (const auto& work : std::exchange(left_work_, {})) work();
  }
}

}  // namespace optstate::session
