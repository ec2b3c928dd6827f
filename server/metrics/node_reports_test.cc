#include "server/metrics/node_reports.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/observe/event_log.h"

namespace optstate::metrics {
namespace {

// A source that holds its callers until it is let go.
class HeldSource : public NodeSource {
 public:
  v1::NodeReport DescribeNode(absl::Time deadline) override {
    const absl::MutexLock lock(&mutex_);
    ++calls_;
    deadline_ = deadline;
    mutex_.Await(absl::Condition(&is_open_));
    v1::NodeReport report;
    report.mutable_status()->set_pid(calls_);
    return report;
  }
  bool IsPublic(const v1::Event& event) override {
    return event.job() != "secret";
  }
  void SetOpen(bool is_open) {
    const absl::MutexLock lock(&mutex_);
    is_open_ = is_open;
  }
  void AwaitCalls(int calls) {
    const absl::MutexLock lock(&mutex_);
    const auto reached = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return calls_ >= calls;
    };
    mutex_.Await(absl::Condition(&reached));
  }
  int calls() {
    const absl::MutexLock lock(&mutex_);
    return calls_;
  }
  absl::Time deadline() {
    const absl::MutexLock lock(&mutex_);
    return deadline_;
  }

 private:
  absl::Mutex mutex_;
  bool is_open_ ABSL_GUARDED_BY(mutex_) = true;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_);
};

class NodeReportsTest : public testing::Test {
 protected:
  void Advance(absl::Duration time) {
    now_ns_ += absl::ToInt64Nanoseconds(time);
  }

  HeldSource source_;
  std::atomic<int64_t> now_ns_ = 1'700'000'000'000'000'000;
  NodeReports reports_{&source_,
                       [this] { return absl::FromUnixNanos(now_ns_); }};
};

TEST_F(NodeReportsTest, AReportIsGivenAgainForASecond) {
  EXPECT_EQ(reports_.Get()->status().pid(), 1);
  Advance(absl::Seconds(1));
  EXPECT_EQ(reports_.Get()->status().pid(), 1);
  Advance(absl::Milliseconds(1));
  EXPECT_EQ(reports_.Get()->status().pid(), 2);
}

TEST_F(NodeReportsTest, EventsAreThoseThatEverybodyMaySee) {
  for (const char* job : {"open", "secret"}) {
    v1::Event event;
    event.set_job(job);
    observe::Events().Add(std::move(event));
  }
  const auto report = reports_.Get();
  ASSERT_GE(report->events_size(), 1);
  EXPECT_EQ(report->events().rbegin()->job(), "open");
  for (const v1::Event& event : report->events()) {
    EXPECT_NE(event.job(), "secret");
  }
}

TEST_F(NodeReportsTest, EnginesHaveTwoSeconds) {
  reports_.Get();
  EXPECT_EQ(source_.deadline(),
            absl::FromUnixNanos(now_ns_) + absl::Seconds(2));
}

TEST_F(NodeReportsTest, ThoseWhoAskAtOnceShareOneReport) {
  source_.SetOpen(false);
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<const v1::NodeReport>> got(8);
  threads.emplace_back([&] { got[0] = reports_.Get(); });
  source_.AwaitCalls(1);
  for (size_t i = 1; i < got.size(); ++i) {
    threads.emplace_back([&, i] { got[i] = reports_.Get(); });
  }
  source_.SetOpen(true);
  for (std::thread& thread : threads) thread.join();
  // Callers that came late find it no older than a second.
  for (const auto& report : got) EXPECT_EQ(report, got[0]);
  EXPECT_EQ(source_.calls(), 1);
}

TEST_F(NodeReportsTest, TheAgeCountsFromTheEndOfTheCollection) {
  source_.SetOpen(false);
  std::thread slow([this] { reports_.Get(); });
  source_.AwaitCalls(1);
  Advance(absl::Seconds(2));
  source_.SetOpen(true);
  slow.join();
  EXPECT_EQ(reports_.Get()->status().pid(), 1);
}

TEST_F(NodeReportsTest, HasTheTimeAndTheLastEvents) {
  for (int i = 0; i < 250; ++i) {
    v1::Event event;
    event.set_kind(absl::StrCat("kind", i));
    observe::Events().Add(event);
  }
  const auto report = reports_.Get();
  EXPECT_EQ(report->at().seconds(), 1'700'000'000);
  ASSERT_EQ(report->events_size(), 200);
  EXPECT_EQ(report->events(0).kind(), "kind50");
  EXPECT_EQ(report->events(199).kind(), "kind249");
}

}  // namespace
}  // namespace optstate::metrics
