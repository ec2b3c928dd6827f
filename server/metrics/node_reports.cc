#include "server/metrics/node_reports.h"

#include <vector>

#include "server/observe/event_log.h"

namespace optstate::metrics {

std::shared_ptr<const v1::NodeReport> NodeReports::Get() {
  {
    const absl::MutexLock lock(&mutex_);
    if (last_ != nullptr && clock_() - last_at_ <= kAgeMax) return last_;
    if (is_collecting_) {
      mutex_.Await(absl::Condition(
          +[](bool* is_collecting) { return !*is_collecting; },
          &is_collecting_));
      return last_;
    }
    is_collecting_ = true;
  }
  std::shared_ptr<const v1::NodeReport> report = Collect();
  const absl::MutexLock lock(&mutex_);
  is_collecting_ = false;
  last_ = std::move(report);
  last_at_ = clock_();
  return last_;
}

std::shared_ptr<const v1::NodeReport> NodeReports::Collect() const {
  auto report = std::make_shared<v1::NodeReport>(
      source_->DescribeNode(clock_() + kAnswerMax));
  std::vector<v1::Event> events = observe::Events().After(0);
  std::erase_if(events, [this](const v1::Event& event) {
    return !source_->IsPublic(event);
  });
  const size_t first =
      events.size() > kEventsMax ? events.size() - kEventsMax : 0;
  for (size_t i = first; i < events.size(); ++i) {
    *report->add_events() = std::move(events[i]);
  }
  const int64_t ns = absl::ToUnixNanos(clock_());
  report->mutable_at()->set_seconds(ns / 1'000'000'000);
  report->mutable_at()->set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
  return report;
}

}  // namespace optstate::metrics
