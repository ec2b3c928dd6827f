// The moments between two steps in which an engine can be replaced.

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/job_harness.h"

namespace optstate {
namespace {

using ::testing::HasSubstr;

// Longer than any call that does not wait.
constexpr absl::Duration kLease = absl::Milliseconds(300);

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

class JobRestTest : public ::testing::TestWithParam<bool> {
 protected:
  JobRestTest() : harness_(TwoRanks(GetParam())) {
    harness_.Start(harness_.RandomTensors(1));
    harness_.SetGradients(harness_.RandomTensors(2));
  }

  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    return spec;
  }
  // Whether there is a moment just now.
  bool Rests() {
    const absl::Status rests =
        harness_.job().Rest(absl::InfinitePast(), absl::InfiniteDuration());
    if (rests.ok()) return true;
    EXPECT_EQ(rests.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(rests.message(), HasSubstr("job \"test\""));
    EXPECT_FALSE(harness_.job().resting());
    return false;
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(1, AdamHyperparams());
  JobHarness harness_;
};

TEST_P(JobRestTest, NotInsideAStep) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 1).ok());
  EXPECT_FALSE(Rests()) << "something is staged";
  ASSERT_TRUE(harness_.Push(0, 1, 1, 1).ok());
  harness_.Commit(0, CommitOf(1));
  EXPECT_FALSE(Rests()) << "a rank waits in its commit";
  ASSERT_TRUE(harness_.Push(1, 1, 0, 2).ok());
  harness_.Commit(1, CommitOf(1));
  EXPECT_TRUE(Rests());
  EXPECT_TRUE(harness_.job().resting());
}

TEST_P(JobRestTest, NotInsideALoad) {
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  EXPECT_FALSE(Rests());
  harness_.LoadMasters(harness_.RandomTensors(3));
  EXPECT_FALSE(Rests());
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_TRUE(Rests());
}

// A rank that is lost may stay away.
TEST_P(JobRestTest, ALostRankLeavesNoStepOpen) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  harness_.Detach(0);
  EXPECT_TRUE(Rests());
}

TEST_P(JobRestTest, WhoAsksWaitsForTheMoment) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  absl::Status rests;
  std::thread asks([&] {
    rests =
        harness_.job().Rest(absl::InfiniteFuture(), absl::InfiniteDuration());
  });
  ASSERT_TRUE(harness_.Push(1, 1, 0, 2).ok());
  for (uint32_t rank = 0; rank < 2; ++rank) harness_.Commit(rank, CommitOf(1));
  asks.join();
  EXPECT_TRUE(rests.ok()) << rests;
  EXPECT_EQ(harness_.job().Describe().committed_step(), 1);
}

TEST_P(JobRestTest, NothingBeginsInIt) {
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"push", [&] { EXPECT_TRUE(harness_.Push(0, 1, 0, 2).ok()); }},
      {"end of a micro-step", [&] { harness_.EndMicroStep(0, 1, 0); }},
      {"commit", [&] { harness_.Commit(0, CommitOf(1)); }},
      {"load", [&] { EXPECT_TRUE(harness_.job().BeginLoad(0).ok()); }}};
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(harness_.job().Rest(absl::InfinitePast(), kLease).ok());
    call();
    EXPECT_FALSE(harness_.job().resting()) << "did not wait for the end";
    ASSERT_TRUE(harness_.job().Abort(0, 1).ok());
  }
}

TEST_P(JobRestTest, LastsAsLongAsTheLastOneAsked) {
  const absl::Duration lease = absl::Seconds(1);
  ASSERT_TRUE(harness_.job().Rest(absl::InfinitePast(), lease).ok());
  absl::Notification done;
  std::thread rank([&] {
    EXPECT_TRUE(harness_.Push(0, 1, 0, 2).ok());
    done.Notify();
  });
  // The rank waits for the end of the first.
  EXPECT_FALSE(done.WaitForNotificationWithTimeout(lease / 2));
  const absl::Time asked = absl::Now();
  EXPECT_TRUE(harness_.job().Rest(absl::InfinitePast(), lease).ok());
  rank.join();
  EXPECT_GE(absl::Now(), asked + lease);
}

TEST_P(JobRestTest, EndsWhenASupervisorResumes) {
  ASSERT_TRUE(Rests());
  absl::Status pushed;
  std::thread rank([&] { pushed = harness_.Push(0, 1, 0, 2); });
  harness_.job().Resume();
  rank.join();
  EXPECT_TRUE(pushed.ok()) << pushed;
}

TEST_P(JobRestTest, GoesOnUntilTheEndWhenTheJobStandsStill) {
  ASSERT_TRUE(harness_.job().Rest(absl::InfinitePast(), kLease).ok());
  harness_.job().StandStill();
  absl::Notification done;
  std::thread rank([&] {
    EXPECT_TRUE(harness_.Push(0, 1, 0, 2).ok());
    done.Notify();
  });
  EXPECT_FALSE(done.WaitForNotificationWithTimeout(2 * kLease));
  harness_.job().Resume();
  rank.join();
}

// Where there is no moment to rest.
TEST_P(JobRestTest, InsideAStepWhoWouldGoOnStandsStillToo) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  harness_.job().StandStill();
  absl::Notification done;
  std::thread rank([&] {
    EXPECT_TRUE(harness_.Push(1, 1, 0, 2).ok());
    done.Notify();
  });
  EXPECT_FALSE(done.WaitForNotificationWithTimeout(kLease));
  harness_.job().Resume();
  rank.join();
}

INSTANTIATE_TEST_SUITE_P(Accumulating, JobRestTest, ::testing::Bool());

}  // namespace
}  // namespace optstate
