// Tests of the notices to waiting ranks when another rank is lost.

#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/os/process_stat.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kNotice[] = "rank 1 lost at step 1, waiting for its return";

JobHarness::Setup ThreeRanks(v1::RankLoss on_rank_loss) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 5000),
                             MakeParameter("b", 3000)};
  setup.world_size = 3;
  setup.partition = PartitionMode::kReplicated;
  setup.accumulate = true;
  setup.on_rank_loss = on_rank_loss;
  return setup;
}

class JobRankLossTest : public ::testing::TestWithParam<v1::RankLoss> {
 protected:
  JobRankLossTest() : harness_(ThreeRanks(GetParam())) { Start(&harness_); }

  static bool Waits() { return GetParam() == v1::RANK_LOSS_WAIT; }
  static void Start(JobHarness* harness) {
    harness->Start(harness->RandomTensors(1));
    for (uint32_t rank = 0; rank < 3; ++rank) {
      harness->SetGradientsOf(rank, harness->RandomTensors(10 + rank));
    }
  }
  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    return spec;
  }
  void BringBack(uint32_t rank) {
    ASSERT_TRUE(harness_.Register(rank).ok());
    ASSERT_TRUE(harness_.Attach(rank).ok());
    harness_.SetGradientsOf(rank, harness_.RandomTensors(10 + rank));
  }
  // Expects that the rank waits for this answer, or is told to take the step
  // again.
  void ExpectToldTo(uint32_t rank, uint64_t request) {
    const auto* answer = harness_.AnswerTo(rank, request);
    if (Waits()) {
      EXPECT_EQ(answer, nullptr);
      EXPECT_THAT(harness_.NoticesTo(rank), ElementsAre(kNotice));
      return;
    }
    ASSERT_NE(answer, nullptr) << "goes on waiting";
    EXPECT_EQ(answer->status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(answer->status.message(), HasSubstr("rank 1 lost at step 1"));
    EXPECT_THAT(harness_.NoticesTo(rank), IsEmpty());
  }
  // Expects that aborted ranks take the step from the start.
  void ExpectUndisturbedStep() {
    harness_.PushAll(1);
    for (uint32_t rank = 0; rank < 3; ++rank)
      harness_.Commit(rank, CommitOf(1));
    JobHarness undisturbed(ThreeRanks(GetParam()));
    Start(&undisturbed);
    undisturbed.PushAll(1);
    undisturbed.CommitAll(CommitOf(1));
    EXPECT_EQ(harness_.job().Describe().committed_step(), 1);
    EXPECT_TRUE(harness_.StateBytes() == undisturbed.StateBytes());
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(1, AdamHyperparams());
  JobHarness harness_;
};

// The other ranks have no gradient, so that no sum can be lost.
TEST_P(JobRankLossTest, InACommit) {
  const uint64_t commit = harness_.Commit(0, CommitOf(1));
  harness_.Detach(1);
  ExpectToldTo(0, commit);
  EXPECT_THAT(harness_.NoticesTo(2), IsEmpty()) << "it does not wait";
  const uint64_t later = harness_.Commit(2, CommitOf(1));
  EXPECT_EQ(harness_.AnswerTo(2, later), nullptr);
  EXPECT_THAT(harness_.NoticesTo(2), ElementsAre(kNotice));
  BringBack(1);
  harness_.Commit(1, CommitOf(1));
  if (!Waits()) harness_.Commit(0, CommitOf(1));
  EXPECT_EQ(harness_.job().Describe().committed_step(), 1);
  // The rank is back, and no rank is notified of its loss again.
  harness_.Commit(2, CommitOf(2));
  EXPECT_EQ(harness_.NoticesTo(2).size(), 1);
}

TEST_P(JobRankLossTest, InTheEndOfAMicroStep) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  const uint64_t end = harness_.EndMicroStep(0, 1, 0);
  EXPECT_EQ(harness_.AnswerTo(0, end), nullptr);
  harness_.Detach(1);
  ExpectToldTo(0, end);
  ASSERT_TRUE(harness_.Push(2, 1, 0, 2).ok());
  const uint64_t later = harness_.EndMicroStep(2, 1, 0);
  EXPECT_EQ(harness_.AnswerTo(2, later), nullptr);
  EXPECT_THAT(harness_.NoticesTo(2), ElementsAre(kNotice));
  BringBack(1);
  ExpectUndisturbedStep();
  const auto* answer = harness_.AnswerTo(2, later);
  ASSERT_NE(answer, nullptr);
  EXPECT_TRUE(answer->status.ok()) << answer->status;
}

// Each loss is told once to ranks that wait already, and to ranks that come
// later.
TEST_P(JobRankLossTest, TwoRanks) {
  const char kNoticeOf2[] = "rank 2 lost at step 1, waiting for its return";
  const uint64_t first = harness_.Commit(0, CommitOf(1));
  harness_.Detach(1);
  ExpectToldTo(0, first);
  const uint64_t second = Waits() ? first : harness_.Commit(0, CommitOf(1));
  harness_.Detach(2);
  if (Waits()) {
    EXPECT_EQ(harness_.AnswerTo(0, second), nullptr);
    EXPECT_THAT(harness_.NoticesTo(0), ElementsAre(kNotice, kNoticeOf2));
    return;
  }
  const auto* answer = harness_.AnswerTo(0, second);
  ASSERT_NE(answer, nullptr) << "goes on waiting";
  EXPECT_EQ(answer->status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(answer->status.message(), HasSubstr("rank 2 lost at step 1"));
  harness_.Commit(0, CommitOf(1));
  EXPECT_THAT(harness_.NoticesTo(0), ElementsAre(kNotice, kNotice, kNoticeOf2));
}

// No rank waits yet.
TEST_P(JobRankLossTest, BetweenTwoSteps) {
  harness_.Detach(1);
  const uint64_t commit = harness_.Commit(0, CommitOf(1));
  EXPECT_EQ(harness_.AnswerTo(0, commit), nullptr);
  EXPECT_THAT(harness_.NoticesTo(0), ElementsAre(kNotice));
}

// One run has ended, and the ranks of the next one come one after another.
TEST_P(JobRankLossTest, NotWhenAllHaveGone) {
  harness_.DetachAll();
  BringBack(0);
  harness_.Commit(0, CommitOf(1));
  EXPECT_THAT(harness_.NoticesTo(0), IsEmpty());
}

// Rank r was attached as kInstance + r when the engine died.
class LostWithTheEngineTest : public JobRankLossTest {
 protected:
  static constexpr uint64_t kInstance = 70;

  LostWithTheEngineTest() {
    harness_.setup().client_instance = kInstance;
    harness_.setup().processes = {{10, 20}, {11, 21}, {12, 22}};
    for (uint32_t rank = 0; rank < 3; ++rank) {
      harness_.Detach(rank);
      BringBack(rank);
    }
  }
  void ReplaceEngine() {
    harness_.Close();
    ASSERT_TRUE(harness_.Open().ok());
  }
  static FormerRank Former(uint32_t rank) {
    return {.rank = rank, .client_instance = kInstance + rank};
  }
};

TEST_P(LostWithTheEngineTest, WhoComesToWaitIsTold) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  ReplaceEngine();
  harness_.job().GiveUp(Former(1));
  BringBack(0);
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  ExpectToldTo(0, harness_.Commit(0, CommitOf(1)));
  BringBack(1);
  BringBack(2);
  if (Waits()) {
    EXPECT_TRUE(harness_.job().Abort(0, 1).ok());
  }
  ExpectUndisturbedStep();
}

TEST_P(LostWithTheEngineTest, WhoWaitsAlreadyIsTold) {
  ReplaceEngine();
  BringBack(0);
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  const uint64_t commit = harness_.Commit(0, CommitOf(1));
  EXPECT_THAT(harness_.NoticesTo(0), IsEmpty());
  harness_.job().GiveUp(Former(1));
  ExpectToldTo(0, commit);
}

TEST_P(LostWithTheEngineTest, NotTwice) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  ReplaceEngine();
  harness_.job().GiveUp(Former(1));
  BringBack(0);
  harness_.Commit(0, CommitOf(1));
  if (Waits()) {
    EXPECT_TRUE(harness_.job().Abort(0, 1).ok());
  }
  const uint64_t again = harness_.Commit(0, CommitOf(1));
  EXPECT_EQ(harness_.AnswerTo(0, again), nullptr) << "waits for its return";
}

TEST_P(LostWithTheEngineTest, WhoWasThereIsKnown) {
  harness_.Detach(1);
  ReplaceEngine();
  BringBack(0);
  const std::vector<FormerRank> awaited = harness_.job().Awaited();
  ASSERT_EQ(awaited.size(), 1u);
  EXPECT_EQ(awaited[0].rank, 2u);
  EXPECT_EQ(awaited[0].client_instance, kInstance + 2);
  EXPECT_EQ(awaited[0].process.pid, 12);
  EXPECT_EQ(awaited[0].process.start_ticks, 22u);
  // The engine after this one awaits the rank too, if it has not returned
  // meanwhile.
  ReplaceEngine();
  EXPECT_EQ(harness_.job().Awaited().size(), 2u);
  harness_.job().GiveUp(Former(2));
  ReplaceEngine();
  ASSERT_EQ(harness_.job().Awaited().size(), 1u);
  EXPECT_EQ(harness_.job().Awaited()[0].rank, 0u);
}

// The previous engine saw the rank go, and died before any rank came to wait.
TEST_P(LostWithTheEngineTest, WhoComesToWaitIsToldOfALossBefore) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  harness_.Detach(1);
  ReplaceEngine();
  BringBack(0);
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  ExpectToldTo(0, harness_.Commit(0, CommitOf(1)));
  // The rank may not have received the answer, until it makes a call.
  ReplaceEngine();
  BringBack(0);
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  ExpectToldTo(0, harness_.Commit(0, CommitOf(1)));
  EXPECT_TRUE(harness_.job().Abort(0, 1).ok());
  // A rank that then takes the step again waits, also with the next engine.
  ReplaceEngine();
  BringBack(0);
  const uint64_t again = harness_.Commit(0, CommitOf(1));
  EXPECT_EQ(harness_.AnswerTo(0, again), nullptr);
  EXPECT_TRUE(harness_.job().Abort(0, 1).ok());
  BringBack(1);
  BringBack(2);
  ExpectUndisturbedStep();
}

// Only the commit makes the step open.
TEST_P(LostWithTheEngineTest, AlsoInAStepWithoutGradients) {
  harness_.Commit(0, CommitOf(1));
  ReplaceEngine();
  harness_.job().GiveUp(Former(1));
  BringBack(0);
  ExpectToldTo(0, harness_.Commit(0, CommitOf(1)));
}

TEST_P(LostWithTheEngineTest, ADrainWaitsForTheirStep) {
  harness_.Commit(0, CommitOf(1));
  ReplaceEngine();
  harness_.job().BeginDrain();
  const absl::Time now = absl::InfinitePast();
  EXPECT_TRUE(absl::IsDeadlineExceeded(harness_.job().AwaitDrained(now)));
  for (uint32_t rank = 0; rank < 3; ++rank) {
    harness_.job().GiveUp(Former(rank));
  }
  EXPECT_TRUE(harness_.job().AwaitDrained(now).ok());
}

// Another session, of which nothing is known yet, takes a rank's place.
TEST_P(LostWithTheEngineTest, NotWhoseRankIsTaken) {
  ReplaceEngine();
  const FormerRank former = Former(2);
  harness_.setup().client_instance = 0;
  BringBack(2);
  EXPECT_EQ(harness_.job().Awaited().size(), 2u);
  ReplaceEngine();
  EXPECT_EQ(harness_.job().Awaited().size(), 2u) << "it cannot come back";
  harness_.job().GiveUp(former);
  BringBack(0);
  harness_.Commit(0, CommitOf(1));
  EXPECT_THAT(harness_.NoticesTo(0), IsEmpty());
}

// No other process takes the place of one that returns to its step.
TEST_P(LostWithTheEngineTest, NotWithinAStepWhileItsProcessRuns) {
  const RankProcess ours = {
      .pid = ::getpid(),
      .start_ticks = os::ReadProcessStat(::getpid())->start_ticks};
  const RankProcess another = {11, 21};
  harness_.Detach(1);
  harness_.setup().processes[1] = ours;
  BringBack(1);
  RegisterSpec other_world = harness_.SpecOf(1);
  other_world.world_size = other_world.local_world_size = 2;
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  ReplaceEngine();
  harness_.setup().client_instance = kInstance + 10;
  harness_.setup().processes[1] = another;
  ASSERT_TRUE(harness_.Register(1).ok());
  const absl::Status taken = harness_.Attach(1).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(taken.message(), HasSubstr(absl::StrCat(ours.pid)));
  EXPECT_EQ(harness_.job().Register(other_world).status().code(),
            absl::StatusCode::kAlreadyExists);
  // A process that returns may open another session, or change the job's shape.
  harness_.setup().processes[1] = ours;
  BringBack(1);
  harness_.Detach(1);
  other_world.process = ours;
  EXPECT_TRUE(harness_.job().Register(other_world).ok());
}

// Between steps nothing would be lost with the rank.
TEST_P(LostWithTheEngineTest, ItIsTakenBetweenStepsThoughItsProcessRuns) {
  harness_.Detach(1);
  harness_.setup().processes[1] = {
      .pid = ::getpid(),
      .start_ticks = os::ReadProcessStat(::getpid())->start_ticks};
  BringBack(1);
  ReplaceEngine();
  harness_.setup().client_instance = kInstance + 10;
  harness_.setup().processes[1] = {11, 21};
  ASSERT_TRUE(harness_.Register(1).ok());
  const absl::Status taken = harness_.Attach(1).status();
  EXPECT_TRUE(taken.ok()) << taken;
}

TEST_P(LostWithTheEngineTest, NotWhoIsBackOrNotAwaited) {
  ReplaceEngine();
  BringBack(0);
  BringBack(1);
  const uint64_t commit = harness_.Commit(0, CommitOf(1));
  harness_.job().GiveUp(Former(1));
  harness_.job().GiveUp({.rank = 2, .client_instance = kInstance + 5});
  harness_.job().GiveUp(Former(7));
  EXPECT_EQ(harness_.AnswerTo(0, commit), nullptr);
  EXPECT_THAT(harness_.NoticesTo(0), IsEmpty());
}

TEST_P(LostWithTheEngineTest, NotWhenAllHaveGone) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 2).ok());
  ReplaceEngine();
  for (uint32_t rank = 0; rank < 3; ++rank) {
    harness_.job().GiveUp(Former(rank));
  }
  harness_.setup().client_instance = kInstance + 10;
  BringBack(0);
  const uint64_t commit = harness_.Commit(0, CommitOf(1));
  EXPECT_EQ(harness_.AnswerTo(0, commit), nullptr);
  EXPECT_THAT(harness_.NoticesTo(0), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(OnRankLoss, LostWithTheEngineTest,
                         ::testing::Values(v1::RANK_LOSS_WAIT,
                                           v1::RANK_LOSS_ABORT),
                         [](const auto& on_rank_loss) {
                           return v1::RankLoss_Name(on_rank_loss.param);
                         });

INSTANTIATE_TEST_SUITE_P(OnRankLoss, JobRankLossTest,
                         ::testing::Values(v1::RANK_LOSS_WAIT,
                                           v1::RANK_LOSS_ABORT),
                         [](const auto& on_rank_loss) {
                           return v1::RankLoss_Name(on_rank_loss.param);
                         });

}  // namespace
}  // namespace optstate::session
