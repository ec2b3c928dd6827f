#ifndef OPTSTATE_SERVER_OBSERVE_EVENT_BUDGET_H_
#define OPTSTATE_SERVER_OBSERVE_EVENT_BUDGET_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace optstate::observe {

// Bounds how often something is told that peers can cause at will: `burst`
// times at once, and once in `interval` after that. What is left out is
// counted.
//
// Threads: thread-safe.
class EventBudget {
 public:
  using Clock = std::function<absl::Time()>;
  EventBudget(double burst, absl::Duration interval, Clock clock = absl::Now)
      : burst_(burst),
        interval_(interval),
        clock_(std::move(clock)),
        left_(burst) {}

  // Returns how many were left out since the last one that was told, if this
  // one is to be told; nullopt: it is left out.
  // `already_left_out`: others before this one that were left out elsewhere,
  // and count here.
  std::optional<uint64_t> Take(uint64_t already_left_out = 0);
  // Returns how many were left out since the last one that was told, if there
  // are some and they may be told now; else 0. Nothing else tells of the last
  // ones of a flood.
  uint64_t TakeLeftOut();

 private:
  void Refill() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const double burst_;
  const absl::Duration interval_;
  const Clock clock_;
  absl::Mutex mutex_;
  double left_ ABSL_GUARDED_BY(mutex_);
  absl::Time at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_EVENT_BUDGET_H_
