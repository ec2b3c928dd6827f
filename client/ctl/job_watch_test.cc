#include "client/ctl/job_watch.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using Texts = std::vector<std::string>;

class JobWatchTest : public testing::Test {
 protected:
  JobWatchTest() {
    job_.set_name("gpt");
    job_.set_phase(v1::JOB_PHASE_READY);
    job_.set_world_size(2);
    job_.set_session_count(2);
    job_.set_committed_step(10);
    job_.set_engine_pid(17);
  }
  Texts Look() {
    now_ += absl::Seconds(1);
    return watch_.Look(job_, now_);
  }
  Texts LookInVain() { return watch_.Look(std::nullopt, now_); }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  v1::Job job_;
  JobWatch watch_{absl::Seconds(10)};
};

TEST_F(JobWatchTest, TheFirstLookSaysHowTheJobIs) {
  EXPECT_EQ(Look(),
            Texts{"phase ready, 2 of 2 ranks attached, committed step 10"});
  EXPECT_EQ(Look(), Texts());
}

TEST_F(JobWatchTest, StepsAreToldNowAndThen) {
  Look();
  for (int i = 0; i < 9; ++i) {
    job_.set_committed_step(11 + static_cast<uint64_t>(i));
    EXPECT_EQ(Look(), Texts());
  }
  EXPECT_EQ(Look(), Texts{"committed step 19"});
  // It has not come on since.
  now_ += absl::Seconds(20);
  EXPECT_EQ(Look(), Texts());
}

TEST_F(JobWatchTest, ARollBackIsToldAtOnce) {
  Look();
  job_.set_committed_step(4);
  EXPECT_EQ(Look(), Texts{"committed step 4, rolled back from 10"});
}

TEST_F(JobWatchTest, RanksPhaseAndEngine) {
  Look();
  job_.set_session_count(1);
  EXPECT_EQ(Look(), Texts{"1 of 2 ranks attached"});
  job_.set_phase(v1::JOB_PHASE_FAILED);
  job_.set_reason("its engine died");
  EXPECT_EQ(Look(), Texts{"phase failed: its engine died"});
  job_.set_engine_pid(18);
  EXPECT_EQ(Look(), Texts{"engine 18 in the place of 17"});
  job_.set_engine_pid(19);
  job_.set_engine_restarts(1);
  EXPECT_EQ(Look(), Texts{"engine restarted, 1 restarts so far"});
}

// An engine that does not answer leaves fields empty that have not changed.
TEST_F(JobWatchTest, WhatIsNotKnownDoesNotChange) {
  Look();
  const v1::Job known = job_;
  job_.set_ranks_unknown(true);
  job_.set_session_count(0);
  job_.set_state_unknown(true);
  job_.set_world_size(0);
  job_.set_committed_step(0);
  EXPECT_EQ(Look(), Texts());
  job_ = known;
  EXPECT_EQ(Look(), Texts());
}

TEST_F(JobWatchTest, JobsComeAndGo) {
  EXPECT_EQ(LookInVain(), Texts{"there is no such job"});
  EXPECT_EQ(LookInVain(), Texts());
  EXPECT_EQ(Look(), Texts{"created, phase ready, 2 of 2 ranks attached, "
                          "committed step 10"});
  EXPECT_EQ(LookInVain(), Texts{"deleted"});
  EXPECT_EQ(LookInVain(), Texts());
}

TEST(WatchGoalTest, GoalsAreParsed) {
  const auto step = ParseGoal("committed_step=1000");
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->kind, WatchGoal::Kind::kCommittedStep);
  EXPECT_EQ(step->step, 1000u);
  for (const char* text : {"phase=FAILED", "phase=failed"}) {
    const auto phase = ParseGoal(text);
    ASSERT_TRUE(phase.ok()) << phase.status();
    EXPECT_EQ(phase->phase, v1::JOB_PHASE_FAILED);
  }
  EXPECT_EQ(ParseGoal("deleted")->kind, WatchGoal::Kind::kDeleted);
  for (const char* text :
       {"", "phase", "phase=", "phase=unspecified", "phase=x",
        "committed_step=", "committed_step=-1", "committed_step=x",
        "committed_step=phase=failed", "step=4", "deleted=1"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseGoal(text).status())) << text;
  }
}

TEST(WatchGoalTest, GoalsAreReachedOrCannotBe) {
  v1::Job job;
  job.set_phase(v1::JOB_PHASE_READY);
  job.set_committed_step(9);
  const WatchGoal step = *ParseGoal("committed_step=10");
  const WatchGoal failed = *ParseGoal("phase=failed");
  const WatchGoal deleted = *ParseGoal("deleted");
  EXPECT_FALSE(*IsReached(step, job));
  EXPECT_FALSE(*IsReached(failed, job));
  EXPECT_FALSE(*IsReached(deleted, job));
  job.set_committed_step(10);
  EXPECT_TRUE(*IsReached(step, job));
  job.set_state_unknown(true);
  EXPECT_FALSE(*IsReached(step, job));

  job.set_phase(v1::JOB_PHASE_FAILED);
  job.set_reason("no memory");
  EXPECT_TRUE(*IsReached(failed, job));
  const auto never = IsReached(step, job);
  EXPECT_TRUE(absl::IsFailedPrecondition(never.status())) << never.status();
  EXPECT_NE(never.status().message().find("no memory"), std::string::npos);

  EXPECT_TRUE(*IsReached(deleted, std::nullopt));
  EXPECT_TRUE(absl::IsNotFound(IsReached(step, std::nullopt).status()));
}

}  // namespace
}  // namespace optstate::ctl
