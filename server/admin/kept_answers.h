#ifndef OPTSTATE_SERVER_ADMIN_KEPT_ANSWERS_H_
#define OPTSTATE_SERVER_ADMIN_KEPT_ANSWERS_H_

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::admin {

// Keeps what engines have said of their jobs for a moment, for callers who say
// that they take an answer of such an age. It is for the engines' own words
// alone: what the supervisor knows, the rights of a job above all, is never
// kept.
//
// Memory: one answer of each job that was asked about in the last two seconds
// or so.
//
// Threads: thread-safe.
class KeptAnswers {
 public:
  // No answer is older.
  static constexpr absl::Duration kAgeMax = absl::Seconds(1);

  using Clock = std::function<absl::Time()>;
  explicit KeptAnswers(Clock clock = absl::Now) : clock_(std::move(clock)) {}

  absl::Time Now() const { return clock_(); }

  // Returns what this engine was asked no longer ago than `age_max`, or than
  // kAgeMax; null: nothing.
  std::shared_ptr<const v1::Job> Find(const std::string& job, pid_t engine,
                                      absl::Duration age_max) const;
  // Keeps the engine's answer to what it was asked at that time, unless there
  // is a newer one.
  void Keep(const std::string& job, pid_t engine, absl::Time asked_at,
            v1::Job answer);

  size_t size() const;

 private:
  struct Kept {
    pid_t engine = 0;
    absl::Time asked_at;
    std::shared_ptr<const v1::Job> answer;
  };

  void DropOld(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Clock clock_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Kept> kept_ ABSL_GUARDED_BY(mutex_);  // by job
  absl::Time dropped_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_KEPT_ANSWERS_H_
