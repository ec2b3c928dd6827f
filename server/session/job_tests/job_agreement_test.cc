// Ranks are told at once when one of them loads and another one takes the step.

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

JobHarness::Setup ThreeRanks(bool accumulates_together) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 6000), MakeParameter("b", 900),
                             MakeParameter("c", 100)};
  setup.world_size = 3;
  setup.client_instance = 30;
  if (accumulates_together) {
    setup.partition = PartitionMode::kReplicated;
    setup.accumulate = true;
  }
  return setup;
}

class JobAgreementTest : public ::testing::Test {
 protected:
  explicit JobAgreementTest(bool accumulates_together = false)
      : harness_(ThreeRanks(accumulates_together)) {
    harness_.Start(masters_);
    harness_.Step(1, harness_.RandomTensors(2), CommitOf(1));
    state_ = harness_.StateBytes();
  }

  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    return spec;
  }
  absl::Status Change(uint32_t rank) {
    absl::Status status = harness_.job().BeginLoad(rank);
    for (uint32_t p = 0; status.ok() && p < changed_.size(); ++p) {
      status = harness_.LoadMaster(rank, p, changed_[p]);
    }
    return status;
  }
  uint64_t Finish(uint32_t rank, uint64_t content_digest = 0) {
    harness_.job().FinishLoad(rank, ++request_,
                              {.content_digest = content_digest});
    return request_;
  }
  uint64_t PushAndCommit(uint32_t rank) {
    EXPECT_TRUE(harness_.Push(rank, 2, 0, 3).ok());
    return harness_.Commit(rank, CommitOf(2));
  }
  static void ExpectTold(const absl::Status& status, const std::string& load,
                         const std::string& step) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("the ranks disagree"),
                      HasSubstr(load + " has begun a load"), HasSubstr(step)));
  }
  void ExpectTold(uint32_t rank, uint64_t request, const std::string& load,
                  const std::string& step) {
    const auto* answer = harness_.AnswerTo(rank, request);
    ASSERT_NE(answer, nullptr) << "rank " << rank << " waits";
    ExpectTold(answer->status, load, step);
  }
  // Expects that nothing was lost, and that all ranks can go on together.
  void ExpectUnchanged() {
    EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_READY);
    EXPECT_TRUE(harness_.StateBytes() == state_);
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(harness_.job().Abort(rank, 2).ok());  // as clients do
    }
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(Change(rank).ok());
    }
    ASSERT_TRUE(harness_.FinishAll().status.ok());
    EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_MASTER, 0), changed_[0]);
    harness_.Step(2, harness_.RandomTensors(3), CommitOf(2));
  }

  const std::vector<Hyperparams> groups_ = {AdamHyperparams()};
  JobHarness harness_;
  const Tensors masters_ = harness_.RandomTensors(1);
  const Tensors changed_ = harness_.RandomTensors(77);
  std::string state_;
  uint64_t request_ = 1000;
};

TEST_F(JobAgreementTest, ACommitBesideALoad) {
  ASSERT_TRUE(Change(0).ok());
  const uint64_t load = Finish(0);
  EXPECT_EQ(harness_.AnswerTo(0, load), nullptr);
  const uint64_t commit = PushAndCommit(1);
  ExpectTold(0, load, "rank 0", "rank 1 has committed step 2");
  ExpectTold(1, commit, "rank 0", "rank 1 has committed step 2");
  // Rank 2 had not reached the step yet, and would otherwise wait for the
  // others.
  ExpectTold(2, PushAndCommit(2), "rank 0", "rank 1 has committed step 2");
  ExpectUnchanged();
}

TEST_F(JobAgreementTest, ACommitBesideALoadThatGoesOn) {
  ASSERT_TRUE(Change(0).ok());
  ASSERT_TRUE(Change(2).ok());
  const uint64_t commit = PushAndCommit(1);
  ExpectTold(1, commit, "rank 0", "rank 1 has committed step 2");
  ExpectTold(harness_.LoadMaster(0, 0, changed_[0]), "rank 0", "rank 1");
  ExpectTold(2, Finish(2), "rank 0", "rank 1");
  ExpectUnchanged();
}

TEST_F(JobAgreementTest, ALoadBesideACommit) {
  const uint64_t commit = PushAndCommit(1);
  EXPECT_EQ(harness_.AnswerTo(1, commit), nullptr);
  ExpectTold(Change(0), "rank 0", "rank 1 has committed step 2");
  ExpectTold(1, commit, "rank 0", "rank 1 has committed step 2");
  ExpectTold(Change(2), "rank 0", "rank 1 has committed step 2");
  EXPECT_EQ(harness_.job().Describe().open_step(), "");
  ExpectUnchanged();
}

// All ranks were to load the same content.
TEST_F(JobAgreementTest, LoadsOfOtherContent) {
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(Change(rank).ok());
  std::vector<uint64_t> requests;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    requests.push_back(Finish(rank, rank == 1 ? 8 : 7));
  }
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const auto* answer = harness_.AnswerTo(rank, requests[rank]);
    ASSERT_NE(answer, nullptr) << "rank " << rank << " waits";
    EXPECT_EQ(answer->status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(answer->status.message(),
                HasSubstr("what rank 1 has loaded (of a state, or of "
                          "parameters that were changed in place) is not what "
                          "rank 0 has loaded"));
  }
  ExpectUnchanged();
}

TEST_F(JobAgreementTest, LoadsOfEqualContent) {
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(Change(rank).ok());
  for (uint32_t rank = 0; rank < 3; ++rank) {
    // A rank that gives no digest is not checked.
    const uint64_t request = Finish(rank, rank == 1 ? 0 : 7);
    if (rank < 2) continue;
    const auto* answer = harness_.AnswerTo(rank, request);
    ASSERT_NE(answer, nullptr);
    EXPECT_TRUE(answer->status.ok()) << answer->status;
  }
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_MASTER, 0), changed_[0]);
}

// Ranks that agree about a load beforehand begin it twice: no other rank's is
// dropped.
TEST_F(JobAgreementTest, ALoadThatIsBegunTwiceBeforeItHasAnything) {
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
  }
  for (uint32_t rank = 0; rank < 3; ++rank) ASSERT_TRUE(Change(rank).ok());
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_MASTER, 0), changed_[0]);
}

// A commit that is repeated because its answer was lost is of no new step.
TEST_F(JobAgreementTest, ARepeatedCommitIsNone) {
  ASSERT_TRUE(Change(0).ok());
  const uint64_t repeated = harness_.Commit(1, CommitOf(1));
  ASSERT_NE(harness_.AnswerTo(1, repeated), nullptr);
  EXPECT_TRUE(harness_.AnswerTo(1, repeated)->status.ok());
  ASSERT_TRUE(Change(1).ok());
  ASSERT_TRUE(Change(2).ok());
  EXPECT_TRUE(harness_.FinishAll().status.ok());
}

// No rank is told twice of a disagreement, and a rank that takes the place of
// another is not told.
TEST_F(JobAgreementTest, ARankThatIsNewHearsNothingOfIt) {
  const uint64_t commit = PushAndCommit(1);
  ExpectTold(Change(0), "rank 0", "rank 1");
  ExpectTold(1, commit, "rank 0", "rank 1");
  harness_.Detach(2);
  ASSERT_TRUE(harness_.Register(2).ok());
  ASSERT_TRUE(harness_.Attach(2).ok());
  ExpectUnchanged();
}

class MicroStepsAgreementTest : public JobAgreementTest {
 protected:
  MicroStepsAgreementTest() : JobAgreementTest(true) {}
};

TEST_F(MicroStepsAgreementTest, TheEndOfAMicroStepBesideALoad) {
  ASSERT_TRUE(Change(0).ok());
  const uint64_t load = Finish(0);
  ASSERT_TRUE(harness_.Push(1, 2, 0, 3).ok());
  const uint64_t end = harness_.EndMicroStep(1, 2, 0);
  ExpectTold(0, load, "rank 0", "rank 1 has ended a micro-step of step 2");
  ExpectTold(1, end, "rank 0", "rank 1 has ended a micro-step of step 2");
  ExpectTold(2, harness_.EndMicroStep(2, 2, 0), "rank 0", "rank 1");
  ExpectUnchanged();
}

TEST_F(MicroStepsAgreementTest, ALoadBesideTheEndOfAMicroStep) {
  ASSERT_TRUE(harness_.Push(1, 2, 0, 3).ok());
  const uint64_t end = harness_.EndMicroStep(1, 2, 0);
  EXPECT_EQ(harness_.AnswerTo(1, end), nullptr);
  ExpectTold(Change(0), "rank 0", "rank 1 has ended a micro-step of step 2");
  ExpectTold(1, end, "rank 0", "rank 1 has ended a micro-step of step 2");
  ExpectTold(Change(2), "rank 0", "rank 1");
  ExpectUnchanged();
}

// Two ranks wait in the second micro-step, the first one is summed.
TEST_F(MicroStepsAgreementTest, SumsAreDroppedOnAllRanks) {
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(harness_.Push(rank, 2, 0, 3).ok());
    harness_.EndMicroStep(rank, 2, 0);
  }
  uint64_t ends[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.Push(rank, 2, 0, 3, 1).ok());
    ends[rank] = harness_.EndMicroStep(rank, 2, 1);
  }
  ExpectTold(Change(2), "rank 2", "rank 0 has ended a micro-step of step 2");
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ExpectTold(rank, ends[rank], "rank 2", "rank 0");
  }
  EXPECT_EQ(harness_.job().Describe().open_step(), "");
  ExpectUnchanged();
}

}  // namespace
}  // namespace optstate::session
