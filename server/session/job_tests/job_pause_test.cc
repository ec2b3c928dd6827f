// Tests of the moments between two steps in which an engine can be replaced.

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLease = absl::Seconds(1);

// A clock that only the test moves. It is years ahead, so that no real deadline
// ends a wait before the test does.
class TestClock {
 public:
  absl::Time Now() const { return absl::FromUnixNanos(now_ns_.load()); }
  void Advance(absl::Duration by) {
    now_ns_.fetch_add(absl::ToInt64Nanoseconds(by));
  }

 private:
  std::atomic<int64_t> now_ns_{
      absl::ToUnixNanos(absl::Now() + absl::Hours(100 * 365 * 24))};
};

// Lets a test go on once a call waits for the end of a pause.
class PauseObserver final : public scheduler::StepObserver {
 public:
  void OnAwaitPauseEnd() override {
    absl::MutexLock lock(&mu_);
    ++count_;
  }
  void Await(int count) {
    absl::MutexLock lock(&mu_);
    const auto reached = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return count_ >= count;
    };
    mu_.Await(absl::Condition(&reached));
  }

 private:
  absl::Mutex mu_;
  int count_ ABSL_GUARDED_BY(mu_) = 0;
};

JobHarness::Setup TwoRanks(bool accumulate) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 5000),
                             MakeParameter("b", 3000)};
  setup.world_size = 2;
  setup.partition = PartitionMode::kReplicated;
  setup.accumulate = accumulate;
  return setup;
}

class JobPauseTest : public ::testing::TestWithParam<bool> {
 protected:
  JobHarness::Setup WithClock(JobHarness::Setup setup) {
    setup.observer = &observer_;
    setup.clock = [this] { return clock_.Now(); };
    return setup;
  }

  JobPauseTest() : harness_(WithClock(TwoRanks(GetParam()))) {
    harness_.Start(harness_.RandomTensors(1));
    harness_.SetGradients(harness_.RandomTensors(2));
  }

  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    return spec;
  }
  // Advances the clock and makes the job look at it, in every waiting call.
  void Leap(absl::Duration by) {
    clock_.Advance(by);
    (void)harness_.job().paused();
  }
  // Returns whether the job can pause now.
  bool CanPause() {
    const absl::Status paused =
        harness_.job().Pause(absl::InfinitePast(), absl::InfiniteDuration());
    if (paused.ok()) return true;
    EXPECT_EQ(paused.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(paused.message(), HasSubstr("job \"test\""));
    EXPECT_FALSE(harness_.job().paused());
    return false;
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(1, AdamHyperparams());
  TestClock clock_;
  PauseObserver observer_;
  JobHarness harness_;
};

TEST_P(JobPauseTest, NotInsideAStep) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 1).ok());
  EXPECT_FALSE(CanPause()) << "something is staged";
  ASSERT_TRUE(harness_.Push(0, 1, 1, 1).ok());
  harness_.Commit(0, CommitOf(1));
  EXPECT_FALSE(CanPause()) << "a rank waits in its commit";
  ASSERT_TRUE(harness_.Push(1, 1, 0, 2).ok());
  harness_.Commit(1, CommitOf(1));
  EXPECT_TRUE(CanPause());
  EXPECT_TRUE(harness_.job().paused());
}

TEST_P(JobPauseTest, NotInsideALoad) {
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  EXPECT_FALSE(CanPause());
  harness_.LoadMasters(harness_.RandomTensors(3));
  EXPECT_FALSE(CanPause());
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_TRUE(CanPause());
}

// A rank that is lost may stay away.
TEST_P(JobPauseTest, ALostRankLeavesNoStepOpen) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  harness_.Detach(0);
  EXPECT_TRUE(CanPause());
}

TEST_P(JobPauseTest, ItsCallerWaitsForTheMoment) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  absl::Status paused;
  std::thread asks([&] {
    paused =
        harness_.job().Pause(absl::InfiniteFuture(), absl::InfiniteDuration());
  });
  ASSERT_TRUE(harness_.Push(1, 1, 0, 2).ok());
  for (uint32_t rank = 0; rank < 2; ++rank) harness_.Commit(rank, CommitOf(1));
  asks.join();
  EXPECT_TRUE(paused.ok()) << paused;
  EXPECT_EQ(harness_.job().Describe().committed_step(), 1);
}

TEST_P(JobPauseTest, NothingBeginsInIt) {
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"push", [&] { EXPECT_TRUE(harness_.Push(0, 1, 0, 2).ok()); }},
      {"end of a micro-step", [&] { harness_.EndMicroStep(0, 1, 0); }},
      {"commit", [&] { harness_.Commit(0, CommitOf(1)); }},
      {"load", [&] { EXPECT_TRUE(harness_.job().BeginLoad(0).ok()); }}};
  int waits = 0;
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(harness_.job().Pause(absl::InfinitePast(), kLease).ok());
    absl::Time ended;
    std::thread rank([&, begin = &call] {
      (*begin)();
      ended = clock_.Now();
    });
    observer_.Await(++waits);
    EXPECT_TRUE(harness_.job().paused());
    const absl::Time end = clock_.Now() + kLease;
    Leap(kLease);
    rank.join();
    EXPECT_EQ(ended, end);
    EXPECT_FALSE(harness_.job().paused());
    ASSERT_TRUE(harness_.job().Abort(0, 1).ok());
  }
}

TEST_P(JobPauseTest, LastsAsLongAsTheLastOneAsked) {
  ASSERT_TRUE(harness_.job().Pause(absl::InfinitePast(), kLease).ok());
  const absl::Time first_end = clock_.Now() + kLease;
  absl::Time pushed;
  std::thread rank([&] {
    EXPECT_TRUE(harness_.Push(0, 1, 0, 2).ok());
    pushed = clock_.Now();
  });
  observer_.Await(1);
  Leap(kLease / 2);
  ASSERT_TRUE(harness_.job().Pause(absl::InfinitePast(), kLease).ok());
  Leap(kLease / 2);
  EXPECT_EQ(clock_.Now(), first_end);
  EXPECT_TRUE(harness_.job().paused()) << "of the second";
  Leap(kLease / 2);
  rank.join();
  EXPECT_EQ(pushed, first_end + kLease / 2);
}

TEST_P(JobPauseTest, EndsWhenASupervisorResumes) {
  ASSERT_TRUE(CanPause());
  absl::Status pushed;
  std::thread rank([&] { pushed = harness_.Push(0, 1, 0, 2); });
  observer_.Await(1);
  harness_.job().Resume();
  rank.join();
  EXPECT_TRUE(pushed.ok()) << pushed;
}

TEST_P(JobPauseTest, LastsUntilTheEndWhenTheJobIsStopped) {
  ASSERT_TRUE(harness_.job().Pause(absl::InfinitePast(), kLease).ok());
  harness_.job().Stop();
  std::atomic<bool> may_go_on{false};
  std::thread rank([&] {
    EXPECT_TRUE(harness_.Push(0, 1, 0, 2).ok());
    EXPECT_TRUE(may_go_on.load());
  });
  observer_.Await(1);
  Leap(1000 * kLease);
  EXPECT_TRUE(harness_.job().paused());
  may_go_on.store(true);
  harness_.job().Resume();
  rank.join();
}

// The job has no moment to pause here.
TEST_P(JobPauseTest, AStopInsideAStepHoldsItsRanksToo) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  harness_.job().Stop();
  std::atomic<bool> may_go_on{false};
  std::thread rank([&] {
    EXPECT_TRUE(harness_.Push(1, 1, 0, 2).ok());
    EXPECT_TRUE(may_go_on.load());
  });
  observer_.Await(1);
  may_go_on.store(true);
  harness_.job().Resume();
  rank.join();
}

INSTANTIATE_TEST_SUITE_P(Accumulating, JobPauseTest, ::testing::Bool());

}  // namespace
}  // namespace optstate::session
