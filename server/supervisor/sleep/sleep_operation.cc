#include "server/supervisor/sleep/sleep_operation.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace optstate::supervisor {

bool SleepOperation::AwaitEnd(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(absl::Condition(&ended_), deadline);
}

absl::Status SleepOperation::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

v1::SleepProgress SleepOperation::progress() const {
  v1::SleepProgress progress;
  progress.set_bytes(control_.bytes);
  progress.set_bytes_total(control_.bytes_total);
  progress.set_directory(folder_);
  absl::MutexLock lock(&mutex_);
  progress.set_done(ended_ && status_.ok());
  progress.set_memory_bytes(memory_bytes_);
  return progress;
}

std::string SleepOperation::Describe(absl::string_view job) const {
  const double mib = 1 << 20;
  std::string text =
      absl::StrCat("job \"", job, "\" is being ",
                   kind_ == Kind::kSleep ? "put to sleep" : "woken");
  if (control_.bytes_total == 0) return text;
  absl::StrAppendFormat(&text, ": %.0f of %.0f MiB",
                        static_cast<double>(control_.bytes) / mib,
                        static_cast<double>(control_.bytes_total) / mib);
  return text;
}

void SleepOperation::End(const absl::Status& status, uint64_t memory_bytes) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  ended_ = true;
  status_ = status;
  memory_bytes_ = memory_bytes;
}

}  // namespace optstate::supervisor
