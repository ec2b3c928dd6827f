#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_OPERATION_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_OPERATION_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/supervisor/sleep/copy_control.h"

namespace optstate::supervisor {

// A job on its way to sleep or awake, as those see it who asked for it. It goes
// on without them.
//
// Threads: thread-safe, but for control().before.
class SleepOperation {
 public:
  enum class Kind { kSleep, kWake };

  // `folder`: where the job sleeps.
  SleepOperation(Kind kind, std::string folder)
      : kind_(kind), folder_(std::move(folder)) {}

  Kind kind() const { return kind_; }
  CopyControl& control() { return control_; }

  // Waits until the operation has ended, `deadline` at most; returns whether it
  // has.
  bool AwaitEnd(absl::Time deadline);
  // Returns how it ended; OK before the end.
  absl::Status status() const;
  v1::SleepProgress progress() const;
  // Returns a sentence for people, without its end.
  std::string Describe(absl::string_view job) const;

  // `memory_bytes`: given back, or taken again.
  void End(const absl::Status& status, uint64_t memory_bytes = 0);

 private:
  const Kind kind_;
  const std::string folder_;
  CopyControl control_;
  mutable absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  uint64_t memory_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_OPERATION_H_
