// Shares out the parameters of a job among the daemons of several nodes, and
// compares all bits with those of one node.

#include "client/collective/sharded/shared_out.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/collective/nodes/places.h"
#include "client/collective/testing/ranks.h"
#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/shard.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

constexpr uint64_t kSteps = 5;
constexpr uint64_t kSkippedStep = 3;
constexpr uint32_t kNodesMax = 4;

using Arrays = std::vector<std::vector<std::byte>>;  // by parameter

// One rank, as a test has it.
struct Rank {
  uint32_t rank = 0;
  std::unique_ptr<SharedOut> shared;
  std::unique_ptr<Session> session;
  Arrays parameters;

  std::vector<absl::Span<std::byte>> spans() {
    std::vector<absl::Span<std::byte>> all;
    for (std::vector<std::byte>& each : parameters) {
      all.push_back(absl::MakeSpan(each));
    }
    return all;
  }
};

void ExpectAllOk(const std::vector<absl::Status>& results) {
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
}

std::vector<std::byte> ArrayOf(Session& session, StateArray array,
                               uint32_t parameter) {
  const ParameterSpec& spec = session.layout().parameters()[parameter];
  std::vector<std::byte> bytes(ElementCount(session.layout(), array, spec) *
                               sizeof(float));
  const auto step = session.Fetch(array, parameter, absl::MakeSpan(bytes));
  EXPECT_TRUE(step.ok()) << step.status();
  return bytes;
}

class SharedOutTest : public testing::Test {
 protected:
  SharedOutTest()
      : layout_(MixedLayout()),
        script_(*Layout::Make(layout_), ScriptSeed()),
        job_(NewJob(layout_)) {}

  void SetUp() override {
    auto one = OpenAt(&of_one_, job_);
    ASSERT_TRUE(one.ok()) << one.status();
    one_ = *std::move(one);
    ASSERT_TRUE(script_.Load(*one_).ok());
    for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
      masters_.push_back(ArrayOf(*one_, StateArray::kMaster, p));
    }
  }

  static absl::StatusOr<std::unique_ptr<Session>> OpenAt(
      FakeDaemon* daemon, SessionOptions options) {
    return Session::OpenOver(
        [daemon](ChannelSetup setup) {
          return MakeFakeChannel(daemon, std::move(setup));
        },
        std::move(options));
  }

  static Places PlacesOf(const Collective& collective, uint32_t ranks_of_node) {
    std::vector<std::string> names;
    for (uint32_t rank = 0; rank < collective.world_size(); ++rank) {
      names.push_back(absl::StrCat("node", rank / ranks_of_node));
    }
    return *Places::Make(std::move(names), collective.rank());
  }

  // Attaches a rank of a new job, and loads what the one node has loaded.
  absl::StatusOr<Rank> Attach(Collective& collective,
                              const SharedOutOptions& how,
                              uint32_t ranks_of_node = 1) {
    const Places places = PlacesOf(collective, ranks_of_node);
    Rank rank;
    rank.rank = collective.rank();
    OPTSTATE_ASSIGN_OR_RETURN(
        rank.shared, SharedOut::Make(&collective, places, layout_, how));
    SessionOptions options = job_;
    rank.shared->Place(&options);
    absl::StatusOr<std::unique_ptr<Session>> session =
        OpenAt(&of_nodes_[places.node()], std::move(options));
    OPTSTATE_RETURN_IF_ERROR(rank.shared->Agree(session.status()));
    rank.session = *std::move(session);
    OPTSTATE_RETURN_IF_ERROR(rank.shared->CheckAttached(*rank.session));
    OPTSTATE_RETURN_IF_ERROR(rank.session->BeginLoad());
    for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
      const ParameterSpec& spec = layout_.parameters[p];
      OPTSTATE_RETURN_IF_ERROR(rank.shared->Load(
          *rank.session, StateArray::kMaster, p, DType::kFloat32, masters_[p]));
      rank.parameters.emplace_back(static_cast<size_t>(spec.numel) *
                                   SizeInBytes(spec.dtype));
    }
    OPTSTATE_RETURN_IF_ERROR(rank.session->FinishLoad());
    OPTSTATE_RETURN_IF_ERROR(rank.shared->Spread(*rank.session, rank.spans()));
    return rank;
  }

  // A step of the script, without what nodes cannot do.
  StepScript::Step MakeStep(uint64_t step) const {
    StepScript::Step made = script_.Make(step);
    made.commit.max_norm = 0;
    return made;
  }

  // Every rank has the gradients of the script, so that their mean is them.
  absl::StatusOr<Outcome> Take(Rank& rank, const StepScript::Step& made,
                               bool found_inf) const {
    std::vector<bool> has(layout_.parameters.size(), false);
    std::vector<absl::Span<const std::byte>> gradients(has.size());
    for (size_t i = 0; i < made.parameters.size(); ++i) {
      has[made.parameters[i]] = true;
      gradients[made.parameters[i]] = made.gradients[i];
    }
    CommitOptions commit = made.commit;
    commit.found_inf = found_inf;
    return rank.shared->Step(*rank.session, commit, gradients, rank.spans(),
                             &has);
  }

  void ExpectParametersOfOne(const Rank& rank) {
    for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
      const absl::Span<const std::byte> expected = one_->parameter(p);
      EXPECT_TRUE(std::equal(rank.parameters[p].begin(),
                             rank.parameters[p].end(), expected.begin(),
                             expected.end()))
          << layout_.parameters[p].name << " on rank " << rank.rank;
    }
  }

  // Compares the state of all shards of the rank's node.
  void ExpectStateOfOne(Session& node) {
    for (uint32_t i = 0; i < node.layout().parameters().size(); ++i) {
      const ParameterSpec& shard = node.layout().parameters()[i];
      if (shard.numel == 0) continue;
      const auto found =
          std::find_if(layout_.parameters.begin(), layout_.parameters.end(),
                       [&shard](const ParameterSpec& each) {
                         return each.name == GlobalName(shard.name);
                       });
      ASSERT_NE(found, layout_.parameters.end()) << shard.name;
      const auto p = static_cast<uint32_t>(found - layout_.parameters.begin());
      const int64_t begin =
          shard.numel == found->numel ? 0 : shard.shard->offset[0];
      for (const StateArray array :
           {StateArray::kMaster, StateArray::kState0, StateArray::kState1}) {
        const std::vector<std::byte> whole = ArrayOf(*one_, array, p);
        const std::vector<std::byte> part = ArrayOf(node, array, i);
        EXPECT_TRUE(std::equal(
            part.begin(), part.end(),
            whole.begin() + begin * static_cast<int64_t>(sizeof(float))))
            << shard.name << ", array " << static_cast<int>(array);
      }
    }
  }

  void ExpectBitsOfOneNode(uint32_t nodes, uint32_t ranks_of_node,
                           const SharedOutOptions& how) {
    const uint32_t world = nodes * ranks_of_node;
    const absl::StatusOr<Collectives> all = MakeTcpRanks(world);
    ASSERT_TRUE(all.ok()) << all.status();
    std::vector<Rank> ranks(world);
    ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
      OPTSTATE_ASSIGN_OR_RETURN(ranks[each.rank()],
                                Attach(each, how, ranks_of_node));
      return absl::OkStatus();
    }));
    if (HasFailure()) return;
    for (const Rank& each : ranks) ExpectParametersOfOne(each);
    for (uint64_t step = 1; step <= kSteps; ++step) {
      const StepScript::Step made = MakeStep(step);
      ASSERT_TRUE(StepScript::Push(*one_, made).ok());
      CommitOptions commit = made.commit;
      commit.found_inf = step == kSkippedStep;
      ASSERT_TRUE(one_->Commit(commit).ok());
      ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
        // One rank alone has found it.
        const bool found_inf = step == kSkippedStep && each.rank() == world - 1;
        OPTSTATE_ASSIGN_OR_RETURN(const Outcome outcome,
                                  Take(ranks[each.rank()], made, found_inf));
        return outcome.applied == (step != kSkippedStep)
                   ? absl::OkStatus()
                   : absl::InternalError("applied where it is not to be");
      }));
      for (const Rank& each : ranks) ExpectParametersOfOne(each);
    }
    for (const Rank& each : ranks) ExpectStateOfOne(*each.session);
  }

  const LayoutSpec layout_;
  const StepScript script_;
  const SessionOptions job_;
  FakeDaemon of_one_;
  FakeDaemon of_nodes_[kNodesMax];
  std::unique_ptr<Session> one_;
  Arrays masters_;
};

// The nodes of the test, the ranks of each, and how they share out.
struct Setting {
  uint32_t nodes = 1;
  uint32_t ranks_of_node = 1;
  PartitionMode ownership = PartitionMode::kGreedy;
};

class SharedOutSettingTest : public SharedOutTest,
                             public testing::WithParamInterface<Setting> {};

TEST_P(SharedOutSettingTest, NodesHaveTheBitsOfOneNode) {
  SharedOutOptions how;
  how.ownership = GetParam().ownership;
  how.reduction.bucket_bytes = 4096;  // shares are cut many times
  ExpectBitsOfOneNode(GetParam().nodes, GetParam().ranks_of_node, how);
}

// The gradients of the script are exact in bfloat16, and so are their sums.
TEST_P(SharedOutSettingTest, BFloat16CarriesTheGradients) {
  SharedOutOptions how;
  how.ownership = GetParam().ownership;
  how.reduction.communication = ElementType::kBFloat16;
  ExpectBitsOfOneNode(GetParam().nodes, GetParam().ranks_of_node, how);
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

// Only one owner's daemon sees the Inf; the others skip the step too.
TEST_F(SharedOutTest, AnInfOfOneRankSkipsTheStepOnAllNodes) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(each, SharedOutOptions()));
    const Arrays before = rank.parameters;
    Arrays ones;
    std::vector<absl::Span<const std::byte>> gradients;
    const auto whole = Layout::Make(layout_);
    for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
      ones.push_back(ConstantGradient(*whole, p, 1));
    }
    if (each.rank() == 1) {
      ones[0] =
          ConstantGradient(*whole, 0, std::numeric_limits<float>::infinity());
    }
    gradients.assign(ones.begin(), ones.end());
    CommitOptions commit = CommitOf(*rank.session, 1);
    OPTSTATE_ASSIGN_OR_RETURN(
        const Outcome skipped,
        rank.shared->Step(*rank.session, commit, gradients, rank.spans()));
    if (skipped.applied || !skipped.found_inf || rank.parameters != before) {
      return absl::InternalError("the step was applied");
    }
    ones[0] = ConstantGradient(*whole, 0, 1);
    gradients.assign(ones.begin(), ones.end());
    commit.step = 2;
    OPTSTATE_ASSIGN_OR_RETURN(
        const Outcome applied,
        rank.shared->Step(*rank.session, commit, gradients, rank.spans()));
    return applied.applied && rank.parameters != before
               ? absl::OkStatus()
               : absl::InternalError("the next step was not applied");
  }));
}

TEST_F(SharedOutTest, ARefusedStepMayBeTakenAgain) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  std::vector<Rank> ranks(2);
  ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
    Rank& rank = ranks[each.rank()];
    OPTSTATE_ASSIGN_OR_RETURN(rank, Attach(each, SharedOutOptions()));
    StepScript::Step made = MakeStep(1);
    if (each.rank() == 1) made.commit.max_norm = 1;
    const absl::Status refused = Take(rank, made, false).status();
    EXPECT_TRUE(absl::IsUnimplemented(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("max_norm"));
    made.commit.max_norm = 0;
    made.commit.step = each.rank() == 1 ? 2 : 1;
    const absl::Status other = Take(rank, made, false).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
    EXPECT_THAT(std::string(other.message()), HasSubstr("2 on rank 1 (node1)"));
    made.commit.step = 1;
    return Take(rank, made, false).status();
  }));
  const StepScript::Step made = MakeStep(1);
  ASSERT_TRUE(StepScript::Push(*one_, made).ok());
  ASSERT_TRUE(one_->Commit(made.commit).ok());
  for (const Rank& each : ranks) ExpectParametersOfOne(each);
}

TEST_F(SharedOutTest, NodesThatAreAtDifferentStepsAreRefused) {
  const absl::StatusOr<Collectives> all = MakeTcpRanks(2);
  ASSERT_TRUE(all.ok()) << all.status();
  const std::vector<absl::Status> results =
      OnRanks(*all, [&](Collective& each) -> absl::Status {
        OPTSTATE_ASSIGN_OR_RETURN(Rank rank, Attach(each, SharedOutOptions()));
        if (each.rank() == 1) {
          OPTSTATE_RETURN_IF_ERROR(
              rank.session->Commit(CommitOf(*rank.session, 1)).status());
        }
        return rank.shared->CheckAttached(*rank.session);
      });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsFailedPrecondition(each)) << each;
    EXPECT_THAT(std::string(each.message()),
                HasSubstr("committed step: 0 on rank 0 (node0), 1 on rank 1"));
  }
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
