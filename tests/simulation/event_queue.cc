#include "tests/simulation/event_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace optstate::simulation {

void EventQueue::After(absl::Duration delay, EventTag tag,
                       std::function<void()> run) {
  heap_.push_back({.at = now() + std::max(delay, absl::ZeroDuration()),
                   .sequence = next_sequence_++,
                   .tag = tag,
                   .run = std::move(run)});
  std::push_heap(heap_.begin(), heap_.end(), IsLater);
}

void EventQueue::RunNext() {
  std::pop_heap(heap_.begin(), heap_.end(), IsLater);
  const Event event = std::move(heap_.back());
  heap_.pop_back();
  clock_.AdvanceTo(event.at);
  ++events_run_;
  trace_.Add(static_cast<uint64_t>(absl::ToUnixNanos(event.at)));
  trace_.Add(uint64_t{event.tag.node} << 32 | event.tag.rank);
  trace_.Add(static_cast<uint64_t>(event.tag.kind));
  event.run();
}

absl::Status EventQueue::RunUntil(absl::Time deadline,
                                  absl::FunctionRef<bool()> is_done) {
  while (!is_done()) {
    if (heap_.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("nothing is left to happen after ", events_run_,
                       " events, and what is awaited has not come"));
    }
    if (heap_.front().at > deadline || events_run_ >= kEventsMax) {
      return absl::DeadlineExceededError(absl::StrCat(
          "what is awaited has not come within the simulated time, or within ",
          kEventsMax, " events; ", events_run_, " have run, ", heap_.size(),
          " are left"));
    }
    RunNext();
  }
  return absl::OkStatus();
}

absl::Status EventQueue::RunFor(absl::Duration time) {
  const absl::Time end = now() + time;
  while (!heap_.empty() && heap_.front().at <= end) {
    if (events_run_ >= kEventsMax) {
      return absl::DeadlineExceededError(
          absl::StrCat("more than ", kEventsMax, " events have run"));
    }
    RunNext();
  }
  clock_.AdvanceTo(end);
  return absl::OkStatus();
}

}  // namespace optstate::simulation
