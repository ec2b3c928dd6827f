// Takes steps on several nodes over the real daemon. A node is a job of its
// own in the one daemon, since nothing but its ranks connects it to the others.

#include "client/collective/nodes/node_agreement.h"

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/collective/single_rank.h"
#include "client/collective/testing/ranks.h"
#include "client/session/job_position.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

constexpr uint32_t kNodes = 2;

// One rank, alone on its node, as a test has it.
struct Rank {
  uint32_t rank = 0;
  std::unique_ptr<NodeAgreement> agreement;
  SessionOptions options;
  std::unique_ptr<Session> session;
};

class NodeAgreementTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto daemon = TestDaemon::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = daemon->release();
  }
  static void TearDownTestSuite() {
    delete daemon_;
    daemon_ = nullptr;
  }
  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    for (uint32_t node = 0; node < kNodes; ++node) {
      jobs_.push_back(NewJob(UniformLayout(3, 100)));
      jobs_.back().endpoint = daemon_->shm_endpoint();
    }
  }

  // Settles, attaches, and loads a new job with ones. Collective.
  absl::StatusOr<Rank> Attach(Collective& collective) {
    Rank rank;
    rank.rank = collective.rank();
    OPTSTATE_ASSIGN_OR_RETURN(
        rank.agreement,
        NodeAgreement::Make(&collective, absl::StrCat("node", rank.rank)));
    rank.options = jobs_[rank.rank];
    rank.agreement->Place(&rank.options);
    OPTSTATE_RETURN_IF_ERROR(rank.agreement->Settle(rank.options));
    absl::StatusOr<std::unique_ptr<Session>> session =
        Session::Open(rank.options);
    OPTSTATE_RETURN_IF_ERROR(rank.agreement->Agree(session.status()));
    rank.session = *std::move(session);
    OPTSTATE_RETURN_IF_ERROR(rank.agreement->CheckAttached(*rank.session));
    if (rank.session->info().phase == JobPhase::kLoading) {
      OPTSTATE_RETURN_IF_ERROR(LoadConstant(*rank.session, 1));
    }
    return rank;
  }

  // Pushes a gradient, and takes the next step on all nodes. Collective.
  static absl::StatusOr<Outcome> Step(Rank& rank, float gradient) {
    const uint64_t step = rank.session->committed_step() + 1;
    OPTSTATE_RETURN_IF_ERROR(PushConstant(*rank.session, step, 0, gradient));
    return rank.agreement->Take(*rank.session, CommitOf(*rank.session, step));
  }

  // Does something on every node with a fresh collective.
  static std::vector<absl::Status> OnNodes(
      const std::function<absl::Status(Collective&)>& what) {
    const absl::StatusOr<Collectives> all = MakeTcpRanks(kNodes);
    EXPECT_TRUE(all.ok()) << all.status();
    if (!all.ok()) return {all.status()};
    return OnRanks(*all, what);
  }

  static std::vector<std::byte> Parameters(const Session& session) {
    std::vector<std::byte> all;
    for (uint32_t i = 0; i < session.layout().parameters().size(); ++i) {
      const absl::Span<const std::byte> each = session.parameter(i);
      all.insert(all.end(), each.begin(), each.end());
    }
    return all;
  }

  // Takes `steps` steps from where the job is; returns the parameters by node.
  std::vector<std::vector<std::byte>> Train(int steps) {
    std::vector<std::vector<std::byte>> parameters(kNodes);
    const std::vector<absl::Status> results =
        OnNodes([&](Collective& collective) -> absl::Status {
          OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(collective));
          for (int i = 0; i < steps; ++i) {
            const float gradient =
                0.25f * static_cast<float>(rank.session->committed_step() + 1);
            OPTSTATE_ASSIGN_OR_RETURN(const Outcome outcome,
                                      Step(rank, gradient));
            if (!outcome.applied) return absl::InternalError("skipped");
          }
          parameters[rank.rank] = Parameters(*rank.session);
          return absl::OkStatus();
        });
    for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
    return parameters;
  }

  // The job's parameters after these steps, taken on one node in one phase.
  std::vector<std::byte> TrainAlone(int steps) {
    SessionOptions options = NewJob(UniformLayout(3, 100));
    options.endpoint = daemon_->shm_endpoint();
    const auto session = Session::Open(options);
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return {};
    EXPECT_TRUE(LoadConstant(**session, 1).ok());
    for (int i = 1; i <= steps; ++i) {
      const auto step = static_cast<uint64_t>(i);
      EXPECT_TRUE(
          PushConstant(**session, step, 0, 0.25f * static_cast<float>(i)).ok());
      EXPECT_TRUE((*session)->Commit(CommitOf(**session, step)).ok());
    }
    return Parameters(**session);
  }

  JobPosition PositionOf(uint32_t node) {
    JobAddress address;
    address.endpoint = jobs_[node].endpoint;
    address.job = jobs_[node].job;
    const absl::StatusOr<JobPosition> position = FindPosition(address);
    EXPECT_TRUE(position.ok()) << position.status();
    return position.value_or(JobPosition());
  }

  static TestDaemon* daemon_;
  std::vector<SessionOptions> jobs_;  // by node
};

TestDaemon* NodeAgreementTest::daemon_ = nullptr;

TEST_F(NodeAgreementTest, NodesHaveTheBitsOfOneNode) {
  const auto first = Train(3);
  EXPECT_EQ(first[0], first[1]);
  EXPECT_EQ(first[0], TrainAlone(3));
  // Ranks that attach next go on.
  const auto second = Train(2);
  EXPECT_EQ(second[0], second[1]);
  EXPECT_EQ(second[0], TrainAlone(5));
  EXPECT_EQ(PositionOf(0).committed_step, 5u);
}

TEST_F(NodeAgreementTest, OneRankTakesStepsToo) {
  const std::unique_ptr<Collective> single = MakeSingleRank();
  absl::StatusOr<Rank> rank = Attach(*single);
  ASSERT_TRUE(rank.ok()) << rank.status();
  const auto outcome = Step(*rank, 0.25f);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->applied);
  EXPECT_FALSE(outcome->prepared);
  EXPECT_EQ(Parameters(*rank->session), TrainAlone(1));
}

TEST_F(NodeAgreementTest, ClippingIsThatOfOneNode) {
  std::vector<Outcome> outcomes(kNodes);
  const std::vector<absl::Status> results =
      OnNodes([&](Collective& collective) -> absl::Status {
        OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(collective));
        OPTSTATE_RETURN_IF_ERROR(PushConstant(*rank.session, 1, 0, 2));
        CommitOptions commit = CommitOf(*rank.session, 1);
        commit.max_norm = 1;
        std::vector<float> read(100);
        const uint32_t parameter = 1;
        void* const destination = read.data();
        ParameterTargets targets;
        targets.parameters = absl::MakeConstSpan(&parameter, 1);
        targets.destinations = absl::MakeConstSpan(&destination, 1);
        OPTSTATE_ASSIGN_OR_RETURN(
            outcomes[rank.rank],
            rank.agreement->Take(*rank.session, commit, targets));
        const absl::Span<const std::byte> there = rank.session->parameter(1);
        return std::memcmp(there.data(), read.data(), there.size()) == 0
                   ? absl::OkStatus()
                   : absl::InternalError("the parameter was not read");
      });
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
  for (const Outcome& each : outcomes) {
    EXPECT_TRUE(each.applied);
    EXPECT_LT(each.clip_coefficient, 1);
    EXPECT_GT(each.clip_coefficient, 0);
    EXPECT_EQ(each.gradient_norm, outcomes[0].gradient_norm);
  }
}

TEST_F(NodeAgreementTest, InfOnOneNodeSkipsOnAll) {
  const std::vector<absl::Status> results =
      OnNodes([&](Collective& collective) -> absl::Status {
        OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(collective));
        const std::vector<std::byte> before = Parameters(*rank.session);
        OPTSTATE_RETURN_IF_ERROR(PushConstant(*rank.session, 1, 0, 0.5f));
        CommitOptions commit = CommitOf(*rank.session, 1);
        commit.found_inf = rank.rank == 1;
        OPTSTATE_ASSIGN_OR_RETURN(const Outcome outcome,
                                  rank.agreement->Take(*rank.session, commit));
        if (outcome.applied || !outcome.found_inf) {
          return absl::InternalError("the step was applied");
        }
        if (Parameters(*rank.session) != before) {
          return absl::InternalError("parameters have changed");
        }
        OPTSTATE_ASSIGN_OR_RETURN(const Outcome next, Step(rank, 0.25f));
        return next.step == 2 && next.applied
                   ? absl::OkStatus()
                   : absl::InternalError("the next step was not applied");
      });
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
}

TEST_F(NodeAgreementTest, OtherGradientsAreTakenOnNoNode) {
  const std::vector<absl::Status> results =
      OnNodes([&](Collective& collective) -> absl::Status {
        OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(collective));
        const absl::Status refused =
            Step(rank, rank.rank == 0 ? 0.5f : 0.75f).status();
        if (!absl::IsFailedPrecondition(refused)) return refused;
        EXPECT_THAT(std::string(refused.message()),
                    HasSubstr("node1: step 1, digest"));
        EXPECT_EQ(rank.session->committed_step(), 0u);
        // Reduced gradients are taken afterwards.
        return Step(rank, 0.25f).status();
      });
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
  EXPECT_EQ(PositionOf(0).committed_step, 1u);
  EXPECT_EQ(PositionOf(1).committed_step, 1u);
}

TEST_F(NodeAgreementTest, OtherLoadsAreTakenOnNoNode) {
  const std::vector<absl::Status> results =
      OnNodes([&](Collective& collective) -> absl::Status {
        OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(collective));
        const std::vector<std::byte> loaded(4, std::byte(rank.rank));
        rank.agreement->NoteLoad(StateArray::kMaster, 0, loaded);
        return Step(rank, 0.5f).status();
      });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsFailedPrecondition(each)) << each;
  }
  EXPECT_EQ(PositionOf(0).committed_step, 0u);
}

TEST_F(NodeAgreementTest, AnErrorOfOneRankIsThatOfAll) {
  const std::vector<absl::Status> results =
      OnNodes([&](Collective& collective) -> absl::Status {
        OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(collective));
        OPTSTATE_RETURN_IF_ERROR(PushConstant(*rank.session, 1, 0, 0.5f));
        CommitOptions commit = CommitOf(*rank.session, 1);
        if (rank.rank == 1) commit.grad_scale = -1;
        const absl::Status refused =
            rank.agreement->Take(*rank.session, commit).status();
        EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
        if (rank.rank == 0) {
          EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 1: "));
        }
        return Step(rank, 0.25f).status();
      });
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
}

// Prepares the first step on the nodes of these ranks, and nobody decides.
void PrepareAndEnd(std::vector<Rank>* ranks, const std::vector<uint32_t>& on,
                   bool awaits_norm = false) {
  for (const uint32_t each : on) {
    Rank& rank = (*ranks)[each];
    ASSERT_TRUE(PushConstant(*rank.session, 1, 0, 0.25f).ok());
    CommitOptions commit = CommitOf(*rank.session, 1);
    commit.awaits_norm = awaits_norm;
    const auto outcome = rank.session->Commit(commit);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_TRUE(outcome->prepared);
  }
}

class LostDecisionTest : public NodeAgreementTest {
 protected:
  void SetUp() override {
    NodeAgreementTest::SetUp();
    ranks_.resize(kNodes);
    const std::vector<absl::Status> results =
        OnNodes([&](Collective& collective) -> absl::Status {
          OPTSTATE_ASSIGN_OR_RETURN(ranks_[collective.rank()],
                                    Attach(collective));
          return absl::OkStatus();
        });
    for (const absl::Status& each : results) ASSERT_TRUE(each.ok()) << each;
  }
  // The ranks of the first run, whose collective has ended.
  std::vector<Rank> ranks_;
};

TEST_F(LostDecisionTest, AStepThatAllHavePreparedIsTakenNext) {
  PrepareAndEnd(&ranks_, {0, 1});
  ranks_.clear();
  EXPECT_EQ(Train(0)[0], TrainAlone(1));
  EXPECT_EQ(Train(1)[1], TrainAlone(2));
}

TEST_F(LostDecisionTest, AStepThatOneHasTakenIsTakenNext) {
  PrepareAndEnd(&ranks_, {0, 1});
  const JobPosition prepared = PositionOf(0);
  ASSERT_TRUE(prepared.prepared.has_value());
  ASSERT_TRUE(ranks_[0]
                  .session
                  ->Decide({.step = 1,
                            .digest = prepared.prepared->digest,
                            .verdict = Verdict::kCommit,
                            .gradient_norm = 0,
                            .clip_coefficient = 1})
                  .ok());
  ranks_.clear();
  const auto parameters = Train(0);
  EXPECT_EQ(parameters[0], TrainAlone(1));
  EXPECT_EQ(parameters[1], parameters[0]);
}

TEST_F(LostDecisionTest, AStepThatOneHasNotPreparedIsDropped) {
  PrepareAndEnd(&ranks_, {1});
  ranks_.clear();
  Train(0);
  EXPECT_EQ(PositionOf(1).committed_step, 0u);
  EXPECT_FALSE(PositionOf(1).prepared.has_value());
  EXPECT_EQ(Train(1)[0], TrainAlone(1));
}

// The nodes took the step together with ranks of other jobs, which are not
// started again.
TEST_F(LostDecisionTest, AStepWhoseNormNoneHasNotedIsDropped) {
  PrepareAndEnd(&ranks_, {0, 1}, /*awaits_norm=*/true);
  ranks_.clear();
  Train(0);
  for (uint32_t node = 0; node < kNodes; ++node) {
    EXPECT_EQ(PositionOf(node).committed_step, 0u);
    EXPECT_FALSE(PositionOf(node).prepared.has_value());
  }
  EXPECT_EQ(Train(1)[0], TrainAlone(1));
}

TEST_F(LostDecisionTest, AStepWhoseNormOneHasNotedIsClippedByIt) {
  // One node by itself tells which norm and parameters are right.
  SessionOptions alone = NewJob(UniformLayout(3, 100));
  alone.endpoint = daemon_->shm_endpoint();
  const auto session = Session::Open(alone);
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE(LoadConstant(**session, 1).ok());
  ASSERT_TRUE(PushConstant(**session, 1, 0, 0.25f).ok());
  CommitOptions commit = CommitOf(**session, 1);
  commit.max_norm = 1;
  const auto clipped = (*session)->Commit(commit);
  ASSERT_TRUE(clipped.ok()) << clipped.status();
  ASSERT_LT(clipped->clip_coefficient, 1);

  PrepareAndEnd(&ranks_, {0, 1}, /*awaits_norm=*/true);
  const JobPosition prepared = PositionOf(1);
  ASSERT_TRUE(prepared.prepared.has_value());
  EXPECT_TRUE(prepared.prepared_awaits_norm);
  ASSERT_TRUE(ranks_[1]
                  .session
                  ->Decide({.step = 1,
                            .digest = prepared.prepared->digest,
                            .verdict = Verdict::kClip,
                            .gradient_norm = clipped->gradient_norm,
                            .clip_coefficient = clipped->clip_coefficient})
                  .ok());
  ranks_.clear();
  const auto parameters = Train(0);
  for (uint32_t node = 0; node < kNodes; ++node) {
    EXPECT_EQ(PositionOf(node).committed_step, 1u);
    EXPECT_EQ(parameters[node], Parameters(**session));
  }
}

TEST_F(LostDecisionTest, NodesThatCannotCatchUpAreRefused) {
  // Node 0 goes on by itself, for two steps.
  ranks_.clear();
  SessionOptions options = jobs_[0];
  const auto session = Session::Open(options);
  ASSERT_TRUE(session.ok()) << session.status();
  for (const uint64_t step : {1, 2}) {
    ASSERT_TRUE(PushConstant(**session, step, 0, 0.25f).ok());
    ASSERT_TRUE((*session)->Commit(CommitOf(**session, step)).ok());
  }
  (*session)->Close();
  const std::vector<absl::Status> results = OnNodes(
      [&](Collective& collective) { return Attach(collective).status(); });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsFailedPrecondition(each)) << each;
    EXPECT_THAT(std::string(each.message()), HasSubstr("node0: step 2"));
  }
}

// The others end between this rank's preparation and its vote.
TEST_F(LostDecisionTest, ARankThatHearsNothingSaysThatTheStepIsPrepared) {
  ranks_.clear();
  const absl::StatusOr<Collectives> all = MakeTcpRanks(kNodes);
  ASSERT_TRUE(all.ok()) << all.status();
  const std::vector<absl::Status> results =
      OnRanks(*all, [&](Collective& collective) -> absl::Status {
        OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(collective));
        if (rank.rank == 1) {
          collective.Abort("this rank is killed");
          return absl::OkStatus();
        }
        // The step is prepared before the other rank's end is noticed, or after
        // it: then it is not begun.
        return Step(rank, 0.25f).status();
      });
  EXPECT_TRUE(results[1].ok()) << results[1];
  EXPECT_TRUE(absl::IsUnavailable(results[0]) || absl::IsAborted(results[0]))
      << results[0];
  EXPECT_THAT(std::string(results[0].message()),
              HasSubstr("this rank is killed"));
  // Only node 0 can have prepared it, so it is dropped.
  Train(0);
  EXPECT_EQ(PositionOf(0).committed_step, 0u);
  EXPECT_FALSE(PositionOf(0).prepared.has_value());
}

TEST_F(NodeAgreementTest, DifferentJobsAreNamed) {
  jobs_[1].layout = UniformLayout(3, 101);
  for (const absl::Status& each : OnNodes([&](Collective& collective) {
         return Attach(collective).status();
       })) {
    EXPECT_TRUE(absl::IsFailedPrecondition(each)) << each;
    EXPECT_THAT(std::string(each.message()),
                HasSubstr("parameter \"p0\" of shape [101]"));
  }
}

TEST_F(NodeAgreementTest, DifferentParametersAreNamed) {
  for (uint32_t node = 0; node < kNodes; ++node) {
    SessionOptions options = jobs_[node];
    const auto session = Session::Open(options);
    ASSERT_TRUE(session.ok()) << session.status();
    ASSERT_TRUE(LoadConstant(**session, static_cast<float>(node)).ok());
    (*session)->Close();
  }
  for (const absl::Status& each : OnNodes([&](Collective& collective) {
         return Attach(collective).status();
       })) {
    EXPECT_TRUE(absl::IsFailedPrecondition(each)) << each;
    EXPECT_THAT(std::string(each.message()),
                HasSubstr("differ in parameter \"p0\": node0"));
  }
}

TEST_F(NodeAgreementTest, WhatIsNotCoveredIsRefused) {
  const std::unique_ptr<Collective> single = MakeSingleRank();
  const auto agreement = NodeAgreement::Make(single.get(), "node0");
  ASSERT_TRUE(agreement.ok()) << agreement.status();
  SessionOptions options = jobs_[0];
  EXPECT_TRUE(absl::IsInvalidArgument((*agreement)->Settle(options)));
  (*agreement)->Place(&options);
  EXPECT_TRUE((*agreement)->Settle(options).ok());
  SessionOptions speculative = options;
  speculative.speculative = true;
  EXPECT_TRUE(absl::IsUnimplemented((*agreement)->Settle(speculative)));
  for (const PartitionMode mode :
       {PartitionMode::kReplicated, PartitionMode::kLocal}) {
    SessionOptions other = options;
    other.partition = mode;
    EXPECT_TRUE(absl::IsUnimplemented((*agreement)->Settle(other)));
  }
}

}  // namespace
}  // namespace optstate::client
