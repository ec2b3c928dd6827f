#include "server/observe/event_log.h"

#include <algorithm>
#include <utility>

#include "server/observe/log_text.h"

namespace optstate::observe {
namespace {

std::string Escaped(absl::string_view text) {
  return LogText(text.substr(0, EventLog::kTextBytesMax));
}

google::protobuf::Timestamp AsTimestamp(absl::Time time) {
  const int64_t ns = absl::ToUnixNanos(time);
  google::protobuf::Timestamp stamp;
  stamp.set_seconds(ns / 1'000'000'000);
  stamp.set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
  return stamp;
}

}  // namespace

void EventLog::Add(v1::Event event) {
  event.set_job(Escaped(event.job()));
  event.set_actor(Escaped(event.actor()));
  event.set_text(Escaped(event.text()));
  const absl::MutexLock lock(&mutex_);
  event.set_sequence(++last_sequence_);
  *event.mutable_at() = AsTimestamp(clock_());
  if (events_.size() == kEventsMax) events_.pop_front();
  events_.push_back(std::move(event));
}

std::vector<v1::Event> EventLog::After(uint64_t after_sequence,
                                       absl::string_view job) const {
  std::vector<v1::Event> found;
  const absl::MutexLock lock(&mutex_);
  for (const v1::Event& event : events_) {
    if (event.sequence() <= after_sequence) continue;
    if (!job.empty() && event.job() != job) continue;
    found.push_back(event);
  }
  return found;
}

uint64_t EventLog::Await(uint64_t after_sequence, absl::Time deadline) const {
  const absl::MutexLock lock(&mutex_);
  const auto has_more = [this, after_sequence]() ABSL_SHARED_LOCKS_REQUIRED(
                            mutex_) { return last_sequence_ > after_sequence; };
  mutex_.AwaitWithDeadline(absl::Condition(&has_more), deadline);
  return last_sequence_;
}

void EventLog::Restore(const std::vector<v1::Event>& events) {
  const absl::MutexLock lock(&mutex_);
  const std::deque<v1::Event> own = std::exchange(events_, {});
  for (const v1::Event& event : events) {
    last_sequence_ = std::max(last_sequence_, event.sequence());
    events_.push_back(event);
  }
  for (v1::Event event : own) {
    event.set_sequence(++last_sequence_);
    events_.push_back(std::move(event));
  }
  while (events_.size() > kEventsMax) events_.pop_front();
}

EventLog& Events() {
  static auto* const log = new EventLog;
  return *log;
}

}  // namespace optstate::observe
