// Tests of engines that die between the micro-steps of several ranks.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

JobHarness::Setup TwoRanks() {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {
      MakeParameter("a", 9000),
      MakeParameter("b", 3000, 0, DType::kBFloat16, DType::kBFloat16),
      MakeParameter("none", 0)};
  setup.world_size = 2;
  setup.partition = PartitionMode::kReplicated;
  setup.accumulate = true;
  setup.client_instance = 70;
  return setup;
}

// Micro-step 1 has no gradient of "b" from rank 1.
class JobMicroStepsCrashTest : public ::testing::Test {
 protected:
  JobMicroStepsCrashTest() : harness_(TwoRanks()) {
    harness_.Start(harness_.RandomTensors(1));
    JobHarness undisturbed(TwoRanks());
    undisturbed.Start(undisturbed.RandomTensors(1));
    PushMicroStep0(&undisturbed);
    PushOfRank1(&undisturbed);
    PushOfRank0(&undisturbed);
    undisturbed.CommitAll(CommitOf1());
    expected_ = undisturbed.StateBytes();
  }

  CommitSpec CommitOf1() const {
    CommitSpec spec;
    spec.step = 1;
    spec.groups = groups_;
    return spec;
  }
  static void Push(JobHarness* harness, uint32_t rank, uint32_t micro_step,
                   uint64_t seed, uint32_t count) {
    harness->SetGradientsOf(rank, harness->RandomTensors(seed));
    const absl::Status status = harness->Push(rank, 1, 0, count, micro_step);
    EXPECT_TRUE(status.ok()) << status;
  }
  static void PushMicroStep0(JobHarness* harness) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      Push(harness, rank, 0, 20 + rank, 3);
    }
  }
  static void PushOfRank0(JobHarness* harness) { Push(harness, 0, 1, 30, 3); }
  static void PushOfRank1(JobHarness* harness) { Push(harness, 1, 1, 31, 1); }
  bool Ends(uint32_t rank, uint32_t micro_step) {
    const uint64_t request = harness_.EndMicroStep(rank, 1, micro_step);
    const auto* answer = harness_.AnswerTo(rank, request);
    return answer != nullptr && answer->status.ok();
  }

  // Forks a process that opens the job, runs `what` and is killed.
  template <typename What>
  void DieAfter(const What& what) {
    harness_.Close();  // no threads in this process when it forks
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      what();
      ::kill(::getpid(), SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
    ASSERT_TRUE(harness_.Open().ok());
  }
  std::vector<StagedRange> AttachTo(uint32_t rank) {
    EXPECT_TRUE(harness_.Register(rank).ok());
    const auto attached = harness_.Attach(rank);
    EXPECT_TRUE(attached.ok()) << attached.status();
    return attached->staged;
  }
  static void ExpectMicroStep(const std::vector<StagedRange>& staged,
                              uint32_t micro_step, uint32_t pieces) {
    ASSERT_EQ(staged.size(), 1);
    EXPECT_EQ(staged[0].first_piece, 0);
    EXPECT_EQ(staged[0].piece_count, pieces);
    EXPECT_EQ(staged[0].micro_step, micro_step);
  }
  void ExpectStep() {
    EXPECT_TRUE(harness_.CommitAll(CommitOf1()).outcome.applied);
    EXPECT_TRUE(harness_.StateBytes() == expected_);
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(1, AdamHyperparams());
  JobHarness harness_;
  std::string expected_;
};

TEST_F(JobMicroStepsCrashTest, SumsAreThereAndThePushesOnTheirWayAreNot) {
  DieAfter([&] {
    PushMicroStep0(&harness_);
    PushOfRank0(&harness_);
    if (Ends(0, 1)) ::_exit(1);
  });
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ExpectMicroStep(AttachTo(rank), 0, 2);
  }
  // Rank 0's former calls are unknown: rank 0 pushes and ends the micro-step
  // again.
  PushOfRank1(&harness_);
  EXPECT_FALSE(Ends(1, 1));
  PushOfRank0(&harness_);
  EXPECT_TRUE(Ends(0, 1));
  // Nothing was kept of an empty parameter.
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(harness_.Push(rank, 1, 2, 1, 0).ok());
  }
  ExpectStep();
}

// The rank may be anywhere: it may even wait for rank 0 outside of the daemon.
TEST_F(JobMicroStepsCrashTest, ARankThatHasEndedNeedNotSaySoAgain) {
  DieAfter([&] {
    PushMicroStep0(&harness_);
    if (!harness_.Push(0, 1, 0, 1, 1).ok()) ::_exit(1);
    PushOfRank1(&harness_);
    if (!Ends(1, 1)) ::_exit(1);
  });
  AttachTo(0);
  PushOfRank0(&harness_);
  EXPECT_TRUE(Ends(0, 1)) << "waits for rank 1, which is not there";
}

class AbortsBeforeTheCrash : public JobMicroStepsCrashTest,
                             public ::testing::WithParamInterface<bool> {};

// Nothing was summed: rank 1 drops only its own part.
TEST_P(AbortsBeforeTheCrash, WhatAnotherRankHasEndedStaysEnded) {
  DieAfter([&] {
    if (!Ends(0, 0)) ::_exit(1);
    if (!harness_.job().Abort(1, 1).ok()) ::_exit(1);
    if (GetParam()) Push(&harness_, 1, 0, 21, 1);
  });
  AttachTo(0);
  AttachTo(1);
  Push(&harness_, 1, 0, 21, 3);
  EXPECT_TRUE(Ends(1, 0)) << "waits for rank 0, which has said that already";
}

INSTANTIATE_TEST_SUITE_P(PushesAgain, AbortsBeforeTheCrash, ::testing::Bool());

TEST_F(JobMicroStepsCrashTest, AnotherProcessInARanksPlaceDropsTheSums) {
  DieAfter([&] { PushMicroStep0(&harness_); });
  ExpectMicroStep(AttachTo(0), 0, 2);
  harness_.setup().client_instance += 10;
  EXPECT_TRUE(AttachTo(1).empty());
  const absl::Status told = harness_.Push(0, 1, 0, 3, 1);
  EXPECT_EQ(told.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(told.message(), HasSubstr("rank 1 was lost"));
  ASSERT_TRUE(harness_.job().Abort(0, 1).ok());
  PushMicroStep0(&harness_);
  PushOfRank1(&harness_);
  PushOfRank0(&harness_);
  ExpectStep();
}

TEST_F(JobMicroStepsCrashTest, WhoAttachesAfterwardsFindsNothingStaged) {
  DieAfter([&] { PushMicroStep0(&harness_); });
  harness_.setup().client_instance += 10;
  EXPECT_TRUE(AttachTo(1).empty());
  harness_.setup().client_instance -= 10;
  EXPECT_TRUE(AttachTo(0).empty());
  PushMicroStep0(&harness_);
  PushOfRank1(&harness_);
  PushOfRank0(&harness_);
  ExpectStep();
}

class DropsBeforeTheCrash : public JobMicroStepsCrashTest,
                            public ::testing::WithParamInterface<uint32_t> {};

// Sums dropped before the engine died do not return with the next engine.
TEST_P(DropsBeforeTheCrash, DroppedSumsStayDropped) {
  const uint32_t rank = GetParam();
  DieAfter([&] {
    PushMicroStep0(&harness_);
    if (!harness_.job().Abort(rank, 1).ok()) ::_exit(1);
    Push(&harness_, rank, 0, 99, 3);
  });
  for (uint32_t each = 0; each < 2; ++each) {
    EXPECT_TRUE(AttachTo(each).empty());
  }
  PushMicroStep0(&harness_);
  PushOfRank1(&harness_);
  PushOfRank0(&harness_);
  ExpectStep();
}

INSTANTIATE_TEST_SUITE_P(Ranks, DropsBeforeTheCrash, ::testing::Values(0, 1));

}  // namespace
}  // namespace optstate::session
