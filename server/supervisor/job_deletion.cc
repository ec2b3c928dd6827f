#include "server/supervisor/job_deletion.h"

namespace optstate::supervisor {

bool JobDeletion::AwaitEnd(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(absl::Condition(&ended_), deadline);
}

absl::Status JobDeletion::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

v1::DeleteProgress JobDeletion::progress() const {
  v1::DeleteProgress progress;
  progress.set_awaits_engine(awaits_engine_);
  progress.set_bytes(removal_.bytes);
  progress.set_bytes_total(removal_.bytes_total);
  absl::MutexLock lock(&mutex_);
  progress.set_done(ended_ && status_.ok());
  if (ended_) progress.set_awaits_engine(false);
  return progress;
}

void JobDeletion::End(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  ended_ = true;
  status_ = status;
}

}  // namespace optstate::supervisor
