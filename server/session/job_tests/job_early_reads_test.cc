// Ranks that read parameters of a step that was begun early.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/session/steps/foreseen_commit.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

// The steps that each test has taken before it begins.
constexpr uint64_t kBefore = ForeseenCommit::kSteps;

JobHarness::Setup TwoRanks(bool speculative) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 20000),
                             MakeParameter("b", 9000)};
  setup.world_size = 2;
  setup.speculative = speculative;
  return setup;
}

class JobEarlyReadsTest : public ::testing::Test {
 protected:
  JobEarlyReadsTest() : harness_(TwoRanks(true)), plain_(TwoRanks(false)) {
    for (JobHarness* harness : {&harness_, &plain_}) {
      harness->Start(harness->RandomTensors(1));
    }
    Settle();
  }
  // Takes steps after which the next one is expected to be as these were.
  void Settle() {
    for (int i = 0; i < ForeseenCommit::kSteps; ++i) {
      Push();
      Finish();
    }
  }
  uint64_t Next() {
    return static_cast<uint64_t>(harness_.job().Describe().committed_step()) +
           1;
  }
  CommitSpec Commit() {
    CommitSpec spec;
    spec.step = Next();
    spec.groups = groups_;
    return spec;
  }
  void Push() {
    harness_.SetGradients(harness_.RandomTensors(Next()));
    harness_.PushAll(Next());
  }
  // Commits what was pushed; the bits are those of a job that begins nothing.
  void Finish() {
    const CommitSpec spec = Commit();
    plain_.SetGradients(plain_.RandomTensors(spec.step));
    plain_.PushAll(spec.step);
    plain_.CommitAll(spec);
    harness_.CommitAll(spec);
    EXPECT_TRUE(harness_.StateBytes() == plain_.StateBytes());
  }
  void WorkAhead() {
    for (const uint32_t rank : {0, 1}) {
      while (harness_.job().WorkAhead(rank)) {
      }
    }
  }
  // The parameters in the memory that ranks share with the engine.
  Tensors Area() { return {harness_.Parameter(0), harness_.Parameter(1)}; }
  void FetchSomething() {
    int64_t count = 0;
    const auto fetched = harness_.job().Fetch(
        v1::STATE_ARRAY_STEP_COUNT, 0, 0, 1,
        absl::MakeSpan(reinterpret_cast<std::byte*>(&count), sizeof(count)));
    ASSERT_TRUE(fetched.ok()) << fetched.status();
  }
  v1::Speculation Counts() { return harness_.job().Describe().speculation(); }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(1, AdamHyperparams());
  JobHarness harness_;
  JobHarness plain_;
};

// Whichever rank's thread has time, also after another push.
TEST_F(JobEarlyReadsTest, AFetchRollsBackAndHoldsTheStep) {
  const Tensors committed = Area();
  Push();
  WorkAhead();
  EXPECT_TRUE(Area() != committed);
  FetchSomething();
  EXPECT_TRUE(Area() == committed);
  WorkAhead();
  EXPECT_TRUE(Area() == committed);
  Push();
  WorkAhead();
  EXPECT_TRUE(Area() == committed);
  Finish();
}

// A fetch before any part of the step is begun holds the step as well.
TEST_F(JobEarlyReadsTest, AHeldStepIsBegunNeitherByPushesNorByACommit) {
  const Tensors committed = Area();
  ASSERT_TRUE(harness_.Push(0, Next(), 0, 2).ok());
  FetchSomething();
  Push();
  WorkAhead();
  EXPECT_TRUE(Area() == committed);
  const CommitSpec spec = Commit();
  const uint64_t request = harness_.Commit(0, spec);
  EXPECT_TRUE(Area() == committed);
  harness_.Commit(1, spec);
  ASSERT_NE(harness_.AnswerTo(0, request), nullptr);
  EXPECT_TRUE(Area() != committed);
  // The next step is another one.
  Push();
  const Tensors held = Area();
  WorkAhead();
  EXPECT_TRUE(Area() != held);
}

// Between steps a fetch holds nothing.
TEST_F(JobEarlyReadsTest, AFetchBetweenStepsHoldsNothing) {
  FetchSomething();
  const Tensors committed = Area();
  Push();
  WorkAhead();
  EXPECT_TRUE(Area() != committed);
  Finish();
}

// A script that reads in each step does not lose time by each.
TEST_F(JobEarlyReadsTest, AfterAReadNothingIsBegunForSomeSteps) {
  const uint64_t before = Counts().steps_begun();  // by the first commits
  Push();
  WorkAhead();
  FetchSomething();
  Finish();
  EXPECT_EQ(Counts().steps_begun(), before + 1);
  EXPECT_EQ(Counts().steps_rolled_back(), 1);
  for (int i = 1; i < ForeseenCommit::kSteps; ++i) {
    const Tensors committed = Area();
    Push();
    WorkAhead();
    EXPECT_TRUE(Area() == committed) << i;
    Finish();
  }
  EXPECT_EQ(Counts().steps_begun(), before + 1);
  Push();
  WorkAhead();
  EXPECT_EQ(Counts().steps_begun(), before + 2);
  Finish();
  EXPECT_EQ(Counts().steps_rolled_back(), 1);
}

TEST_F(JobEarlyReadsTest, AJobThatIsNotSpeculativeCountsNothing) {
  EXPECT_FALSE(plain_.job().Describe().has_speculation());
}

}  // namespace
}  // namespace optstate::session
