#ifndef OPTSTATE_SERVER_OBSERVE_EVENT_LOG_H_
#define OPTSTATE_SERVER_OBSERVE_EVENT_LOG_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::observe {

// The last events of the node, in memory, for `optctl events` and the page.
//
// The number of events and the length of their texts are bounded, so that a
// full log takes less than 8 MiB. Each event belongs to the user in
// Event.owner_uid, or to the node when that is absent. A full log forgets the
// oldest event of the user with the most events: a user whose jobs flood the
// log pushes out events of its own alone.
//
// Sequences ascend by one. The first one comes from the clock, so that the
// sequences of a daemon that is started anew are above those of the one before,
// unless the clock was set back.
//
// Threads: thread-safe.
class EventLog {
 public:
  static constexpr size_t kEventsMax = 4096;
  // Limits of an event's texts, escaped; the rest is cut.
  static constexpr size_t kTextBytesMax = 1024;
  static constexpr size_t kNameBytesMax = 160;

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

  // Continues another log, of the build that this one replaced: its events come
  // before those of this log, which get new sequences.
  void Restore(const std::vector<v1::Event>& events);

 private:
  // The user that events belong to; kNode: the node.
  using Owner = int64_t;
  static constexpr Owner kNode = -1;

  static Owner OwnerOf(const v1::Event& event);
  void Append(v1::Event event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<v1::Event> AfterLocked(uint64_t after_sequence,
                                     absl::string_view job) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const Clock clock_;
  mutable absl::Mutex mutex_;
  uint64_t last_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  // None of the queues is empty.
  std::map<Owner, std::deque<v1::Event>> events_ ABSL_GUARDED_BY(mutex_);
};

// The log of the process.
EventLog& Events();

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_EVENT_LOG_H_
