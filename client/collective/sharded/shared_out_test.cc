// Shares out the parameters of a job among the daemons of several nodes, and
// compares all bits with those of one node.

#include "client/collective/sharded/shared_out.h"

#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/collective/sharded/shared_out_fixture.h"
#include "client/collective/testing/ranks.h"
#include "client/fake/failing_channel.h"
#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

constexpr uint64_t kSteps = 6;
constexpr uint64_t kSkippedStep = 3;

// The nodes of the test, the ranks of each, and how they share out.
struct Setting {
  uint32_t nodes = 1;
  uint32_t ranks_of_node = 1;
  PartitionMode ownership = PartitionMode::kGreedy;
};

class SharedOutSettingTest : public SharedOutTest,
                             public testing::WithParamInterface<Setting> {
 protected:
  // Takes steps of the script (exact sums of squares) or rough ones.
  void ExpectBitsOfOneNode(const SharedOutOptions& how, bool is_rough) {
    const uint32_t ranks_of_node = GetParam().ranks_of_node;
    const uint32_t world = GetParam().nodes * ranks_of_node;
    const absl::StatusOr<Collectives> all = MakeTcpRanks(world);
    ASSERT_TRUE(all.ok()) << all.status();
    std::vector<SharedRank> ranks(world);
    ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
      OPTSTATE_ASSIGN_OR_RETURN(ranks[each.rank()],
                                Attach(each, how, ranks_of_node));
      return absl::OkStatus();
    }));
    if (HasFailure()) return;
    for (const SharedRank& each : ranks) ExpectParametersOfOne(each);
    for (uint64_t step = 1; step <= kSteps; ++step) {
      const StepScript::Step made =
          is_rough ? MakeRoughStep(step, /*draw=*/step) : script_.Make(step);
      const bool is_skipped = step == kSkippedStep;
      const Outcome of_one = TakeOnOne(made, is_skipped);
      EXPECT_EQ(of_one.applied, !is_skipped);
      ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
        // One rank alone has found Inf or NaN.
        const bool found_inf = is_skipped && each.rank() == world - 1;
        OPTSTATE_ASSIGN_OR_RETURN(const Outcome outcome,
                                  Take(ranks[each.rank()], made, found_inf));
        ExpectOutcomeOfOne(outcome, of_one);
        return absl::OkStatus();
      }));
      if (HasFailure()) return;
      for (const SharedRank& each : ranks) ExpectParametersOfOne(each);
    }
    for (const SharedRank& each : ranks) ExpectStateOfOne(*each.session);
  }
};

TEST_P(SharedOutSettingTest, NodesHaveTheBitsOfOneNode) {
  SharedOutOptions how;
  how.ownership = GetParam().ownership;
  how.reduction.bucket_bytes = 4096;  // shares are cut many times
  ExpectBitsOfOneNode(how, /*is_rough=*/false);
}

// The gradients of the script are exact in bfloat16, and so are their sums.
TEST_P(SharedOutSettingTest, BFloat16CarriesTheGradients) {
  SharedOutOptions how;
  how.ownership = GetParam().ownership;
  how.reduction.communication = ElementType::kBFloat16;
  ExpectBitsOfOneNode(how, /*is_rough=*/false);
}

TEST_P(SharedOutSettingTest, NodesClipAsOneNodeDoes) {
  SharedOutOptions how;
  how.ownership = GetParam().ownership;
  ExpectBitsOfOneNode(how, /*is_rough=*/true);
}

INSTANTIATE_TEST_SUITE_P(
    All, SharedOutSettingTest,
    testing::Values(Setting{1, 1, PartitionMode::kGreedy},
                    Setting{2, 1, PartitionMode::kGreedy},
                    Setting{4, 1, PartitionMode::kGreedy},
                    Setting{2, 2, PartitionMode::kGreedy},
                    Setting{1, 1, PartitionMode::kContiguous},
                    Setting{2, 1, PartitionMode::kContiguous},
                    Setting{4, 1, PartitionMode::kContiguous},
                    Setting{2, 2, PartitionMode::kContiguous}),
    [](const testing::TestParamInfo<Setting>& test) {
      return absl::StrCat(
          test.param.nodes, "_nodes_of_", test.param.ranks_of_node,
          test.param.ownership == PartitionMode::kGreedy ? "_greedy"
                                                         : "_contiguous");
    });

class LossScalerTest : public SharedOutTest {
 protected:
  LossScalerTest() { job_.loss_scaler = LossScaler(); }
};

// The sum overflows at one owner; the others skip the step too, and all daemons
// lower their loss scale.
TEST_F(LossScalerTest, AnOverflowAtOneOwnerSkipsTheStepOnAllNodes) {
  constexpr float kLarge = 3e38f;
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
    SharedOutOptions how;
    how.reduction.reduction = ReductionOp::kSum;
    OPTSTATE_ASSIGN_OR_RETURN(SharedRank rank, Attach(each, how));
    const double scale = rank.session->info().loss_scaler.loss_scale;
    const Arrays before = rank.parameters;
    const auto whole = Layout::Make(layout_);
    const auto step = [&](uint64_t number, float of_first) {
      Arrays arrays;
      for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
        arrays.push_back(ConstantGradient(*whole, p, p == 0 ? of_first : 1));
      }
      const std::vector<absl::Span<const std::byte>> gradients(arrays.begin(),
                                                               arrays.end());
      CommitOptions commit = CommitOf(*rank.session, number);
      commit.grad_scale = rank.session->info().loss_scaler.loss_scale;
      commit.max_norm = 1;
      return rank.shared->Step(*rank.session, commit, gradients, rank.spans());
    };
    OPTSTATE_ASSIGN_OR_RETURN(const Outcome skipped, step(1, kLarge));
    EXPECT_FALSE(skipped.applied);
    EXPECT_TRUE(skipped.found_inf);
    EXPECT_FALSE(std::isfinite(skipped.gradient_norm));
    EXPECT_EQ(skipped.loss_scale, scale / 2);
    EXPECT_EQ(rank.parameters, before);
    OPTSTATE_ASSIGN_OR_RETURN(const Outcome applied, step(2, 1));
    EXPECT_TRUE(applied.applied);
    EXPECT_TRUE(std::isfinite(applied.gradient_norm));
    EXPECT_EQ(applied.loss_scale, scale / 2);
    EXPECT_NE(rank.parameters, before);
    return absl::OkStatus();
  }));
}

// A gradient that one rank lacks counts as 0; one that all lack is none.
TEST_F(SharedOutTest, AMissingGradientUpdatesNothing) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  const auto whole = Layout::Make(layout_);
  // The one node has the mean, without a gradient of parameter 0.
  StepScript::Step mean;
  mean.commit = CommitOf(*one_, 1);
  mean.commit.max_norm = 0.25;
  for (uint32_t p = 1; p < layout_.parameters.size(); ++p) {
    mean.parameters.push_back(p);
    mean.gradients.push_back(ConstantGradient(*whole, p, p == 1 ? 0.5f : 1));
  }
  const Outcome of_one = TakeOnOne(mean, false);
  std::vector<SharedRank> ranks(2);
  ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
    SharedRank& rank = ranks[each.rank()];
    OPTSTATE_ASSIGN_OR_RETURN(rank, Attach(each, SharedOutOptions()));
    StepScript::Step mine = mean;
    if (each.rank() == 0) {
      mine.gradients[0] = ConstantGradient(*whole, 1, 1);
    } else {
      mine.parameters.erase(mine.parameters.begin());
      mine.gradients.erase(mine.gradients.begin());
    }
    OPTSTATE_ASSIGN_OR_RETURN(const Outcome outcome, Take(rank, mine, false));
    ExpectOutcomeOfOne(outcome, of_one);
    return absl::OkStatus();
  }));
  if (HasFailure()) return;
  for (const SharedRank& each : ranks) {
    ExpectParametersOfOne(each);
    ExpectStateOfOne(*each.session);
  }
}

TEST_F(SharedOutTest, ARefusedStepMayBeTakenAgain) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  std::vector<SharedRank> ranks(2);
  const StepScript::Step made = script_.Make(1);
  ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
    SharedRank& rank = ranks[each.rank()];
    OPTSTATE_ASSIGN_OR_RETURN(rank, Attach(each, SharedOutOptions()));
    const bool is_other = each.rank() == 1;
    StepScript::Step refused = made;
    if (is_other) refused.commit.groups[0].max_norm = 1;
    const absl::Status group = Take(rank, refused, false).status();
    EXPECT_TRUE(absl::IsUnimplemented(group)) << group;
    EXPECT_THAT(std::string(group.message()), HasSubstr("max_norm"));
    refused = made;
    refused.commit.max_norm = is_other ? -1 : 1;
    const absl::Status norm = Take(rank, refused, false).status();
    EXPECT_TRUE(absl::IsInvalidArgument(norm)) << norm;
    EXPECT_THAT(std::string(norm.message()), HasSubstr("max_norm: -1"));
    refused.commit.max_norm = is_other ? 2 : 1;
    const absl::Status settings = Take(rank, refused, false).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(settings)) << settings;
    EXPECT_THAT(std::string(settings.message()), HasSubstr("settings"));
    refused = made;
    refused.commit.step = is_other ? 2 : 1;
    const absl::Status step = Take(rank, refused, false).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(step)) << step;
    EXPECT_THAT(std::string(step.message()), HasSubstr("2 on rank 1 (node1)"));
    // Daemons refuse this one, after ranks have pushed their gradients.
    refused = made;
    refused.commit.max_value = -1;
    const absl::Status value = Take(rank, refused, false).status();
    EXPECT_TRUE(absl::IsInvalidArgument(value)) << value;
    return Take(rank, made, false).status();
  }));
  TakeOnOne(made, false);
  for (const SharedRank& each : ranks) ExpectParametersOfOne(each);
}

// Two nodes, each with a model of the daemon, which takes a step in one phase.
class DroppingTest : public testing::Test {
 protected:
  static constexpr int64_t kNumel = 50;

  // One of the ranks, which has loaded 1 everywhere.
  struct Rank {
    std::unique_ptr<SharedOut> shared;
    std::unique_ptr<Session> session;
    Arrays parameters;
  };

  absl::StatusOr<Rank> Attach(Collective& collective) {
    const uint32_t number = collective.rank();
    Rank rank;
    OPTSTATE_ASSIGN_OR_RETURN(
        rank.shared, SharedOut::Make(&collective, absl::StrCat("node", number),
                                     layout_, SharedOutOptions()));
    SessionOptions options = NewJob(layout_);
    rank.shared->Place(&options);
    OPTSTATE_ASSIGN_OR_RETURN(
        rank.session,
        Session::OpenOver(
            [&](ChannelSetup setup) {
              return MakeFailingChannel(
                  MakeFakeChannel(&daemons_[number], std::move(setup)),
                  &faults_[number]);
            },
            std::move(options)));
    OPTSTATE_RETURN_IF_ERROR(rank.session->BeginLoad());
    const std::vector<std::byte> ones = ConstantGradient(whole_, 0, 1);
    for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
      OPTSTATE_RETURN_IF_ERROR(rank.shared->Load(
          *rank.session, StateArray::kMaster, p, DType::kFloat32, ones));
      rank.parameters.push_back(ones);
    }
    OPTSTATE_RETURN_IF_ERROR(rank.session->FinishLoad());
    return rank;
  }

  // Takes the first step, with this value in all gradients.
  absl::Status Take(Rank& rank, float value) const {
    Arrays arrays;
    std::vector<absl::Span<std::byte>> parameters;
    for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
      arrays.push_back(ConstantGradient(whole_, p, value));
      parameters.push_back(absl::MakeSpan(rank.parameters[p]));
    }
    const std::vector<absl::Span<const std::byte>> gradients(arrays.begin(),
                                                             arrays.end());
    return rank.shared
        ->Step(*rank.session, CommitOf(*rank.session, 1), gradients, parameters)
        .status();
  }

  const LayoutSpec layout_ = UniformLayout(2, kNumel);
  const Layout whole_ = *Layout::Make(layout_);
  std::array<FakeDaemon, 2> daemons_;
  std::array<ChannelFaults, 2> faults_;  // by rank
};

// The daemon of rank 0 would take the next gradients for a repeat of those that
// it still has.
TEST_F(DroppingTest, WhatCouldNotBeDroppedIsDroppedByTheNextStep) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  std::array<Rank, 2> ranks;
  ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
    Rank& rank = ranks[each.rank()];
    OPTSTATE_ASSIGN_OR_RETURN(rank, Attach(each));
    ChannelFaults& faults = faults_[each.rank()];
    const bool is_first = each.rank() == 0;
    if (is_first) faults.lost_aborts = 2;
    if (!is_first) faults.refused_pushes = 1;
    const absl::Status refused = Take(rank, 1);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("made up fault"));
    EXPECT_EQ(absl::StrContains(refused.message(), "could not be dropped"),
              is_first)
        << refused;
    // The first rank cannot begin the step, which is then taken on none.
    const absl::Status again = Take(rank, -1);
    EXPECT_TRUE(absl::IsDeadlineExceeded(again)) << again;
    EXPECT_EQ(rank.session->committed_step(), 0);
    return Take(rank, -1);
  }));
  FakeDaemon daemon;
  const auto one = Session::OpenOver(
      [&](ChannelSetup setup) {
        return MakeFakeChannel(&daemon, std::move(setup));
      },
      NewJob(layout_));
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_TRUE(LoadConstant(**one, 1).ok());
  ASSERT_TRUE(PushConstant(**one, 1, 0, -1).ok());
  ASSERT_TRUE((*one)->Commit(CommitOf(**one, 1)).ok());
  for (const Rank& rank : ranks) {
    for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
      EXPECT_TRUE(absl::MakeConstSpan(rank.parameters[p]) ==
                  (*one)->parameter(p));
    }
  }
}

TEST_F(SharedOutTest, NodesThatAreAtDifferentStepsAreRefused) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  std::vector<SharedRank> ranks(2);
  const std::vector<absl::Status> results =
      OnRanks(*all, [&](Collective& each) -> absl::Status {
        SharedRank& rank = ranks[each.rank()];
        OPTSTATE_ASSIGN_OR_RETURN(rank, Attach(each, SharedOutOptions()));
        if (each.rank() == 1) {
          // This node goes on by itself.
          OPTSTATE_RETURN_IF_ERROR(PushConstant(*rank.session, 1, 0, 1));
          OPTSTATE_ASSIGN_OR_RETURN(
              const Outcome prepared,
              rank.session->Commit(CommitOf(*rank.session, 1)));
          OPTSTATE_RETURN_IF_ERROR(rank.session
                                       ->Decide({.step = 1,
                                                 .digest = prepared.digest,
                                                 .verdict = Verdict::kCommit,
                                                 .gradient_norm = 0,
                                                 .clip_coefficient = 1})
                                       .status());
        }
        const absl::Status attached = rank.shared->CheckAttached(*rank.session);
        EXPECT_THAT(
            std::string(attached.message()),
            HasSubstr("committed step: 0 on rank 0 (node0), 1 on rank 1"));
        SessionOptions options = OptionsOf(each.rank());
        rank.shared->Place(&options);
        return rank.shared->Settle(options);
      });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsFailedPrecondition(each)) << each;
    EXPECT_THAT(std::string(each.message()), HasSubstr("node1: step 1"));
  }
}

TEST_F(SharedOutTest, SessionsThatCannotBeHadAreRefused) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(
        const std::unique_ptr<SharedOut> shared,
        SharedOut::Make(&each, PlacesOf(each, 1), layout_, SharedOutOptions()));
    SessionOptions options = OptionsOf(each.rank());
    EXPECT_TRUE(absl::IsInvalidArgument(shared->Settle(options)));
    shared->Place(&options);
    options.speculative = true;
    EXPECT_TRUE(absl::IsUnimplemented(shared->Settle(options)));
    options.speculative = false;
    if (each.rank() == 1) options.loss_scaler = LossScaler();
    const absl::Status scaler = shared->Settle(options);
    EXPECT_TRUE(absl::IsFailedPrecondition(scaler)) << scaler;
    EXPECT_THAT(std::string(scaler.message()), HasSubstr("loss scaler"));
    options.loss_scaler.reset();
    return shared->Settle(options);
  }));
}

TEST_F(SharedOutTest, RanksThatShareOutDifferentlyAreRefused) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  const std::vector<absl::Status> results =
      OnRanks(*all, [&](Collective& each) {
        SharedOutOptions how;
        if (each.rank() == 1) how.ownership = PartitionMode::kContiguous;
        return SharedOut::Make(&each, PlacesOf(each, 1), layout_, how).status();
      });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsFailedPrecondition(each)) << each;
    EXPECT_THAT(std::string(each.message()),
                HasSubstr("partition 2 on rank 1 (node1)"));
  }
}

TEST_F(SharedOutTest, WhatCannotBeSharedOutIsRefusedOnAllRanks) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  LayoutSpec matrix;
  matrix.optimizer = OptimizerKind::kMuon;
  matrix.groups = {{.options = 0}};
  matrix.parameters = {{.name = "w",
                        .shape = {100, 100},
                        .numel = 10'000,
                        .dtype = DType::kFloat32,
                        .gradient_dtype = DType::kFloat32,
                        .group = 0}};
  ExpectAllOk(OnRanks(*all, [&](Collective& each) {
    const auto make = [&](const LayoutSpec& layout,
                          const SharedOutOptions& how) {
      return SharedOut::Make(&each, PlacesOf(each, 1), layout, how).status();
    };
    SharedOutOptions how;
    EXPECT_TRUE(make(matrix, how).ok());
    how.ownership = PartitionMode::kContiguous;
    const absl::Status cut = make(matrix, how);
    EXPECT_TRUE(absl::IsUnimplemented(cut)) << cut;
    how.ownership = PartitionMode::kReplicated;
    EXPECT_TRUE(absl::IsInvalidArgument(make(layout_, how)));
    how = SharedOutOptions();
    how.reduction.quantization = BlockQuantization();
    EXPECT_TRUE(absl::IsUnimplemented(make(layout_, how)));
    // An error of one rank is that of all.
    how = SharedOutOptions();
    if (each.rank() == 1) how.reduction.bucket_bytes = 1;
    EXPECT_TRUE(absl::IsInvalidArgument(make(layout_, how)));
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace optstate::client
