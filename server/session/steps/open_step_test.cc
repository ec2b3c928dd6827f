#include "server/session/steps/open_step.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate::session {
namespace {

using scheduler::StageAction;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kNothing = StageAction::kNothing;
constexpr auto kStage = StageAction::kStage;

// Two groups: "a", "b" and "c" of ten elements each.
Layout ThreeParameters() {
  LayoutSpec spec;
  spec.groups.resize(2);
  for (const char* name : {"a", "b", "c"}) {
    ParameterSpec parameter;
    parameter.name = name;
    parameter.shape = {10};
    parameter.numel = 10;
    parameter.group = name[0] == 'c' ? 1 : 0;
    spec.parameters.push_back(parameter);
  }
  return *Layout::Make(std::move(spec));
}

RankPartition PartitionOf(const std::vector<Piece>& pieces) {
  RankPartition partition;
  partition.pieces = pieces;
  return partition;
}

class OpenStepTest : public ::testing::Test {
 protected:
  explicit OpenStepTest(bool replicated = false) {
    step_.Reset(&layout_, partitions_, replicated);
  }

  absl::Status Push(uint32_t rank, uint32_t first, uint32_t end,
                    uint32_t micro_step = 0, bool accumulate = false) {
    return step_.PlanPush(rank, micro_step, first, end, accumulate, &push_);
  }
  void Commit(uint32_t rank) {
    CommitSpec spec;
    spec.groups = groups_;
    step_.NoteCommit(rank, /*request_id=*/100 + rank, spec);
  }
  // Returns which parameters the step updates; they must be resolved.
  std::vector<uint8_t> Resolve() {
    absl::Span<const uint8_t> updated;
    const absl::Status resolved = step_.ResolveParameters(&updated);
    EXPECT_TRUE(resolved.ok()) << resolved;
    return {updated.begin(), updated.end()};
  }

  const Layout layout_ = ThreeParameters();
  // "b" is cut in two.
  const std::vector<RankPartition> partitions_ = {
      PartitionOf({{0, 0, 10}, {1, 0, 5}}),
      PartitionOf({{1, 5, 5}, {2, 0, 10}})};
  const std::vector<Hyperparams> groups_ = std::vector<Hyperparams>(2);
  OpenStep step_;
  OpenStep::Push push_;  // the last
};

TEST_F(OpenStepTest, BeginsWithNothing) {
  EXPECT_FALSE(step_.any());
  EXPECT_FALSE(step_.all_committed());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(step_.opened_by(rank));
    EXPECT_FALSE(step_.commit(rank).committed);
    EXPECT_THAT(step_.StagedRanges(rank), IsEmpty());
  }
  EXPECT_FALSE(step_.IsWhole(0));
  EXPECT_THAT(Resolve(), ElementsAre(0, 0, 0));
}

TEST_F(OpenStepTest, APushStagesTheRanksPiecesOfTheParameters) {
  ASSERT_TRUE(Push(1, 0, 3).ok());
  EXPECT_EQ(push_.first_piece, 0u);
  EXPECT_THAT(push_.actions, ElementsAre(kStage, kStage));
  ASSERT_TRUE(Push(0, 1, 3).ok());
  EXPECT_EQ(push_.first_piece, 1u);
  EXPECT_THAT(push_.actions, ElementsAre(kStage));
  EXPECT_TRUE(step_.any());
  EXPECT_EQ(step_.staged_by(0), 1u);
  EXPECT_EQ(step_.staged_by(1), 2u);
  EXPECT_EQ(step_.staged_pieces(1), 2u);
  EXPECT_TRUE(step_.IsWhole(1));
  EXPECT_FALSE(step_.IsWhole(0));
}

TEST_F(OpenStepTest, APushOfNoPieceOfTheRankOpensNothing) {
  ASSERT_TRUE(Push(0, 2, 3).ok());
  EXPECT_THAT(push_.actions, IsEmpty());
  ASSERT_TRUE(Push(1, 1, 1).ok());
  EXPECT_THAT(push_.actions, IsEmpty());
  EXPECT_FALSE(step_.any());
}

// Without accumulation statistics follow the present gradient; a sum has it
// already.
TEST_F(OpenStepTest, ARepeatCountsOnce) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  ASSERT_TRUE(Push(0, 0, 2).ok());
  EXPECT_THAT(push_.actions, ElementsAre(kStage, kStage));
  EXPECT_EQ(step_.staged_by(0), 2u);
  EXPECT_EQ(step_.staged_pieces(0), 1u);
  ASSERT_TRUE(Push(0, 0, 2, 0, /*accumulate=*/true).ok());
  EXPECT_THAT(push_.actions, ElementsAre(kNothing, kNothing));
  ASSERT_TRUE(Push(0, 1, 2, 3, /*accumulate=*/true).ok());
  ASSERT_TRUE(Push(0, 0, 2, 3, /*accumulate=*/true).ok());
  EXPECT_THAT(push_.actions, ElementsAre(kStage, kNothing));
  EXPECT_EQ(step_.staged_by(0), 2u);
}

TEST_F(OpenStepTest, AnotherMicroStepNeedsAccumulation) {
  ASSERT_TRUE(Push(0, 1, 2, 1).ok());
  const absl::Status refused = Push(0, 0, 2, 2);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(refused.message(),
            "parameter 1 \"b\" was pushed at micro-step 1 of this step "
            "already, now at 2; register the job with accumulate to sum "
            "micro-steps");
  EXPECT_EQ(step_.staged_pieces(0), 0u) << "nothing of the push is noted";
  EXPECT_FALSE(Push(0, 1, 2, 0).ok());
  EXPECT_THAT(step_.StagedRanges(0),
              ElementsAre(Field(&StagedRange::micro_step, 1)));
}

TEST_F(OpenStepTest, MicroStepsAscend) {
  ASSERT_TRUE(Push(0, 0, 2, 1, /*accumulate=*/true).ok());
  ASSERT_TRUE(Push(0, 1, 2, 4, /*accumulate=*/true).ok());
  const absl::Status refused = Push(0, 0, 2, 3, /*accumulate=*/true);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(refused.message(),
            "parameter 1 \"b\" was pushed at micro-step 4 already, now at 3; "
            "micro-steps must ascend");
  EXPECT_THAT(step_.StagedRanges(0),
              ElementsAre(Field(&StagedRange::micro_step, 1),
                          Field(&StagedRange::micro_step, 4)))
      << "nothing of the push is noted";
}

TEST_F(OpenStepTest, StagedRangesAreJoined) {
  const std::vector<RankPartition> one = {
      PartitionOf({{0, 0, 10}, {1, 0, 10}, {2, 0, 10}})};
  step_.Reset(&layout_, one, /*replicated=*/false);
  const auto ranges = [&] {
    std::vector<std::string> texts;
    for (const StagedRange& range : step_.StagedRanges(0)) {
      texts.push_back(absl::StrCat(range.first_piece, "+", range.piece_count,
                                   "@", range.micro_step));
    }
    return texts;
  };
  step_.NoteStaged(0, 2, 7);
  step_.NoteStaged(0, 0, 7);
  EXPECT_THAT(ranges(), ElementsAre("0+1@7", "2+1@7"));
  step_.NoteStaged(0, 1, 8);
  EXPECT_THAT(ranges(), ElementsAre("0+1@7", "1+1@8", "2+1@7"));
  step_.NoteStaged(0, 1, 7);
  EXPECT_THAT(ranges(), ElementsAre("0+3@7"));
}

TEST_F(OpenStepTest, AStepOfAllRanksOrOfNone) {
  ASSERT_TRUE(Push(0, 0, 3).ok());
  absl::Span<const uint8_t> updated;
  const absl::Status refused = step_.ResolveParameters(&updated);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(),
              HasSubstr("1 of 2 pieces of parameter 1 \"b\" were pushed: all "
                        "ranks that own a part of it must push, or none"));
  EXPECT_THAT(refused.message(), HasSubstr("push and commit the step again"));
  ASSERT_TRUE(Push(1, 1, 2).ok());
  EXPECT_THAT(Resolve(), ElementsAre(1, 1, 0));
  EXPECT_THAT(step_.pushed_by(), IsEmpty());
}

TEST_F(OpenStepTest, ACommitIsKept) {
  std::vector<Hyperparams> groups(2);
  groups[1].value[0] = 0.5;
  CommitSpec spec;
  spec.step = 9;
  spec.groups = groups;
  step_.NoteCommit(1, /*request_id=*/33, spec);
  groups[1].value[0] = 0;  // the caller's memory is its own again
  EXPECT_TRUE(step_.any());
  EXPECT_TRUE(step_.opened_by(1));
  EXPECT_FALSE(step_.opened_by(0));
  EXPECT_TRUE(step_.commit(1).committed);
  EXPECT_EQ(step_.commit(1).request_id, 33u);
  EXPECT_EQ(step_.commit(1).spec().step, 9u);
  EXPECT_EQ(step_.commit(1).spec().groups[1].value[0], 0.5);
  EXPECT_FALSE(step_.all_committed());
  Commit(0);
  EXPECT_TRUE(step_.all_committed());
}

TEST_F(OpenStepTest, CommittedParametersHaveNoRankThatMayPushMore) {
  ASSERT_TRUE(Push(0, 0, 3).ok());
  ASSERT_TRUE(Push(1, 0, 3).ok());
  EXPECT_THAT(step_.CommittedParameters(), ElementsAre(0, 0, 0));
  Commit(1);
  EXPECT_THAT(step_.CommittedParameters(), ElementsAre(0, 0, 1));
  Commit(0);
  EXPECT_THAT(step_.CommittedParameters(), ElementsAre(1, 1, 1));
  step_.DropAll();
  Commit(0);
  Commit(1);
  EXPECT_THAT(step_.CommittedParameters(), ElementsAre(0, 0, 0));
}

TEST_F(OpenStepTest, DropsOneRankOrAll) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(Push(rank, 0, 3).ok());
    Commit(rank);
  }
  step_.DropRank(0);
  EXPECT_FALSE(step_.opened_by(0));
  EXPECT_FALSE(step_.all_committed());
  EXPECT_TRUE(step_.opened_by(1));
  EXPECT_EQ(step_.staged_pieces(0), 0u);
  EXPECT_EQ(step_.staged_pieces(1), 1u);
  step_.DropRank(0);  // it has nothing
  EXPECT_TRUE(step_.any());
  Commit(0);
  EXPECT_TRUE(step_.all_committed());
  step_.DropAll();
  EXPECT_FALSE(step_.any());
  EXPECT_FALSE(step_.all_committed());
  EXPECT_EQ(step_.staged_pieces(1), 0u);
  EXPECT_TRUE(Push(0, 0, 3, /*micro_step=*/5).ok()) << "of no former push";
}

TEST_F(OpenStepTest, ResetTakesAnotherJob) {
  ASSERT_TRUE(Push(0, 0, 3).ok());
  Commit(0);
  const std::vector<RankPartition> one = {
      PartitionOf({{0, 0, 10}, {1, 0, 10}, {2, 0, 10}})};
  step_.Reset(&layout_, one, /*replicated=*/false);
  EXPECT_FALSE(step_.any());
  EXPECT_EQ(step_.staged_pieces(1), 0u);
  ASSERT_TRUE(Push(0, 0, 3, /*micro_step=*/2).ok());
  EXPECT_THAT(push_.actions, ElementsAre(kStage, kStage, kStage));
  Commit(0);
  EXPECT_TRUE(step_.all_committed());
  EXPECT_THAT(Resolve(), ElementsAre(1, 1, 1));
}

TEST_F(OpenStepTest, OperatorsSeeWhoHasNotCommitted) {
  EXPECT_EQ(step_.Describe(), "ranks 0, 1 have not committed");
  Commit(0);
  EXPECT_EQ(step_.Describe(), "rank 1 has not committed");
  Commit(1);
  EXPECT_EQ(step_.Describe(), "all ranks have committed");
  const std::vector<RankPartition> many(11);
  step_.Reset(&layout_, many, /*replicated=*/false);
  Commit(3);
  EXPECT_EQ(step_.Describe(),
            "ranks 0, 1, 2, 4, 5, 6, 7, 8 and 2 more have not committed");
}

// Ranks with gradients of all parameters.
class ReplicatedOpenStepTest : public OpenStepTest {
 protected:
  ReplicatedOpenStepTest() { ResetFor(3); }

  void ResetFor(size_t ranks) {
    replicas_.assign(ranks, PartitionOf({{0, 0, 10}, {1, 0, 10}, {2, 0, 10}}));
    step_.Reset(&layout_, replicas_, /*replicated=*/true);
  }

  std::vector<RankPartition> replicas_;
};

TEST_F(ReplicatedOpenStepTest, TheLastRankStages) {
  ASSERT_TRUE(Push(0, 0, 3).ok());
  EXPECT_THAT(push_.actions, ElementsAre(kNothing, kNothing, kNothing));
  ASSERT_TRUE(Push(2, 1, 3).ok());
  EXPECT_THAT(push_.actions, ElementsAre(kNothing, kNothing));
  ASSERT_TRUE(Push(1, 0, 2).ok());
  EXPECT_EQ(push_.first_piece, 0u);
  EXPECT_THAT(push_.actions, ElementsAre(kNothing, kStage));
  ASSERT_TRUE(Push(0, 1, 2).ok());
  EXPECT_THAT(push_.actions, ElementsAre(kStage)) << "the gradient may differ";
}

TEST_F(ReplicatedOpenStepTest, SomeRanksAreEnough) {
  ASSERT_TRUE(Push(0, 0, 1).ok());
  ASSERT_TRUE(Push(2, 0, 2).ok());
  EXPECT_THAT(Resolve(), ElementsAre(1, 1, 0));
  EXPECT_THAT(step_.pushed_by(), ElementsAre(0b101, 0b100, 0));
  EXPECT_THAT(step_.PlanPartly(), ElementsAre(kStage, kStage, kNothing));
  ASSERT_TRUE(Push(1, 0, 1).ok());
  EXPECT_THAT(Resolve(), ElementsAre(1, 1, 0));
  EXPECT_THAT(step_.pushed_by(), ElementsAre(0b111, 0b100, 0));
  EXPECT_THAT(step_.PlanPartly(), ElementsAre(kNothing, kStage, kNothing));
  ASSERT_TRUE(Push(0, 1, 2).ok());
  ASSERT_TRUE(Push(1, 1, 2).ok());
  EXPECT_THAT(Resolve(), ElementsAre(1, 1, 0));
  EXPECT_THAT(step_.pushed_by(), IsEmpty()) << "all have pushed what is there";
}

// A rank is a bit of a word.
TEST_F(ReplicatedOpenStepTest, OfMoreRanksThanBitsAllPush) {
  ResetFor(OpenStep::kPushedByRanksMax);
  ASSERT_TRUE(Push(63, 0, 1).ok());
  EXPECT_THAT(Resolve(), ElementsAre(1, 0, 0));
  EXPECT_THAT(step_.pushed_by(), ElementsAre(uint64_t{1} << 63, 0, 0));
  ResetFor(OpenStep::kPushedByRanksMax + 1);
  ASSERT_TRUE(Push(63, 0, 1).ok());
  absl::Span<const uint8_t> updated;
  const absl::Status refused = step_.ResolveParameters(&updated);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("1 of 65 pieces of parameter 0"));
}

// Compares with the last micro-step of each piece, kept by itself.
TEST(OpenStepRandomTest, CountsAreThoseOfThePieces) {
  RandomLayouts random;
  for (int round = 0; round < 30; ++round) {
    const Layout layout = *Layout::Make(random.Next(12));
    const auto parameters = static_cast<uint32_t>(layout.parameters().size());
    const auto world_size = static_cast<uint32_t>(random.Uniform(1, 4));
    std::vector<RankPartition> partitions;
    std::vector<std::vector<std::optional<uint32_t>>> staged;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      partitions.push_back(*MakeRankPartition(
          layout, PartitionMode::kContiguous, world_size, rank));
      staged.emplace_back(partitions[rank].pieces.size());
    }
    OpenStep step;
    step.Reset(&layout, partitions, /*replicated=*/false);
    for (int call = 0; call < 60; ++call) {
      const auto rank =
          static_cast<uint32_t>(random.Uniform(0, world_size - 1));
      if (random.Uniform(0, 9) == 0) {
        step.DropRank(rank);
        staged[rank].assign(staged[rank].size(), std::nullopt);
      } else {
        const auto first = static_cast<uint32_t>(random.Uniform(0, parameters));
        const auto end =
            static_cast<uint32_t>(random.Uniform(first, parameters));
        const auto micro_step = static_cast<uint32_t>(random.Uniform(0, 3));
        std::vector<std::optional<uint32_t>> after = staged[rank];
        bool ascends = true;
        for (size_t i = 0; i < after.size(); ++i) {
          const uint32_t parameter = partitions[rank].pieces[i].parameter;
          if (parameter < first || parameter >= end) continue;
          ascends &= after[i].value_or(0) <= micro_step;
          after[i] = micro_step;
        }
        OpenStep::Push push;
        ASSERT_EQ(step.PlanPush(rank, micro_step, first, end,
                                /*accumulate=*/true, &push)
                      .ok(),
                  ascends);
        if (ascends) staged[rank] = after;
      }
      std::vector<uint32_t> counts(parameters);
      for (uint32_t r = 0; r < world_size; ++r) {
        std::vector<std::optional<uint32_t>> told(staged[r].size());
        for (const StagedRange& range : step.StagedRanges(r)) {
          std::fill_n(told.begin() + range.first_piece, range.piece_count,
                      range.micro_step);
        }
        ASSERT_EQ(told, staged[r]);
        uint64_t pieces = 0;
        for (size_t i = 0; i < staged[r].size(); ++i) {
          if (!staged[r][i].has_value()) continue;
          ++counts[partitions[r].pieces[i].parameter];
          ++pieces;
        }
        ASSERT_EQ(step.staged_by(r), pieces);
      }
      for (uint32_t p = 0; p < parameters; ++p) {
        ASSERT_EQ(step.staged_pieces(p), counts[p]) << "parameter " << p;
      }
    }
  }
}

}  // namespace
}  // namespace optstate::session
