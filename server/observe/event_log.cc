#include "server/observe/event_log.h"

#include <algorithm>
#include <utility>

#include "server/observe/log_text.h"

namespace optstate::observe {
namespace {

// The first sequence of a log is the number of seconds since 1970 times this:
// a log that gets fewer events a second stays below its successors. Sequences
// stay below 2^53, which JavaScript's numbers can tell apart.
constexpr uint64_t kSequencesPerSecond = 10'000;

// Escapes a text and cuts it between two characters of UTF-8: protobuf refuses
// a part of one.
std::string Escaped(absl::string_view text, size_t bytes_max) {
  std::string escaped = LogText(text);
  if (escaped.size() <= bytes_max) return escaped;
  const auto continues = [&escaped](size_t i) {
    return (static_cast<unsigned char>(escaped[i]) & 0xc0) == 0x80;
  };
  size_t end = bytes_max;
  while (end > 0 && continues(end)) --end;
  escaped.resize(end);
  return escaped;
}

google::protobuf::Timestamp AsTimestamp(absl::Time time) {
  const int64_t ns = absl::ToUnixNanos(time);
  google::protobuf::Timestamp stamp;
  stamp.set_seconds(ns / 1'000'000'000);
  stamp.set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
  return stamp;
}

uint64_t FirstSequence(absl::Time now) {
  const int64_t now_s = std::max<int64_t>(absl::ToUnixSeconds(now), 0);
  return static_cast<uint64_t>(now_s) * kSequencesPerSecond + 1;
}

}  // namespace

EventLog::Owner EventLog::OwnerOf(const v1::Event& event) {
  return event.has_owner_uid() ? static_cast<Owner>(event.owner_uid()) : kNode;
}

void EventLog::Add(v1::Event event) {
  event.set_kind(Escaped(event.kind(), kNameBytesMax));
  event.set_job(Escaped(event.job(), kNameBytesMax));
  event.set_actor(Escaped(event.actor(), kNameBytesMax));
  event.set_text(Escaped(event.text(), kTextBytesMax));
  const absl::MutexLock lock(&mutex_);
  const absl::Time now = clock_();
  last_sequence_ =
      last_sequence_ == 0 ? FirstSequence(now) : last_sequence_ + 1;
  event.set_sequence(last_sequence_);
  *event.mutable_at() = AsTimestamp(now);
  Append(std::move(event));
}

void EventLog::Append(v1::Event event) {
  events_[OwnerOf(event)].push_back(std::move(event));
  if (++count_ > kEventsMax) Forget();
}

// Forgets the oldest event of the owner with the most; of several such, of the
// one whose oldest event is the oldest.
void EventLog::Forget() {
  const auto most = std::max_element(
      events_.begin(), events_.end(), [](const auto& a, const auto& b) {
        if (a.second.size() != b.second.size()) {
          return a.second.size() < b.second.size();
        }
        return a.second.front().sequence() > b.second.front().sequence();
      });
  most->second.pop_front();
  if (most->second.empty()) events_.erase(most);
  --count_;
}

std::vector<v1::Event> EventLog::After(uint64_t after_sequence,
                                       absl::string_view job) const {
  const absl::MutexLock lock(&mutex_);
  return AfterLocked(after_sequence, job);
}

std::vector<v1::Event> EventLog::AfterLocked(uint64_t after_sequence,
                                             absl::string_view job) const {
  std::vector<v1::Event> found;
  for (const auto& [owner, events] : events_) {
    for (auto it = events.rbegin(); it != events.rend(); ++it) {
      if (it->sequence() <= after_sequence) break;
      if (job.empty() || it->job() == job) found.push_back(*it);
    }
  }
  std::sort(found.begin(), found.end(),
            [](const v1::Event& a, const v1::Event& b) {
              return a.sequence() < b.sequence();
            });
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
  const std::vector<v1::Event> own = AfterLocked(0, "");
  events_.clear();
  count_ = 0;
  if (!events.empty()) last_sequence_ = 0;
  for (const v1::Event& event : events) {
    // A queue ascends, whatever another build has handed over.
    if (event.sequence() <= last_sequence_) continue;
    last_sequence_ = event.sequence();
    Append(event);
  }
  for (v1::Event event : own) {
    if (!events.empty()) event.set_sequence(++last_sequence_);
    Append(std::move(event));
  }
}

EventLog& Events() {
  static auto* const log = new EventLog;
  return *log;
}

}  // namespace optstate::observe
