#ifndef OPTSTATE_SERVER_OBSERVE_EVENT_LOG_H_
#define OPTSTATE_SERVER_OBSERVE_EVENT_LOG_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::observe {

// The last events of the node, in memory, for `optctl events` and the page.
// What is remembered is bounded: the oldest events go first.
//
// Threads: thread-safe.
class EventLog {
 public:
  static constexpr size_t kEventsMax = 4096;
  // Limit of an event's text; the rest is cut.
  static constexpr size_t kTextBytesMax = 1024;

  using Clock = std::function<absl::Time()>;
  explicit EventLog(Clock clock = absl::Now) : clock_(std::move(clock)) {}

  // Adds an event, whose sequence and time are set here. Texts are escaped, as
  // log lines are.
  void Add(v1::Event event);

  // Returns the events after `after_sequence`, of `job` alone unless that is
  // empty, oldest first.
  std::vector<v1::Event> After(uint64_t after_sequence,
                               absl::string_view job = "") const;

  // Waits until there is an event after `after_sequence`, or the deadline.
  // Returns the last event's sequence, 0 when there is none.
  uint64_t Await(uint64_t after_sequence, absl::Time deadline) const;

  // Continues another log, of the build that this one replaced.
  void Restore(const std::vector<v1::Event>& events);

 private:
  const Clock clock_;
  mutable absl::Mutex mutex_;
  uint64_t last_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<v1::Event> events_ ABSL_GUARDED_BY(mutex_);
};

// The log of the process.
EventLog& Events();

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_EVENT_LOG_H_
