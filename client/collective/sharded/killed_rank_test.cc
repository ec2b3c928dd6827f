// A rank of nodes that share out parameters is killed at each point of a step,
// and all are started again: the step is taken once on every node, or on none.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/collective/sharded/shared_out.h"
#include "client/collective/sharded/shared_out_fixture.h"
#include "client/collective/testing/ending_collective.h"
#include "client/collective/testing/ranks.h"
#include "client/session/job_position.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/status_macros.h"
#include "proto/types/step_verdict.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

constexpr uint32_t kNodes = 2;
// Operations of a step, at most.
constexpr uint64_t kOperationsMax = 40;

// A killed rank leaves this on all nodes.
struct Remains {
  StepScript::Step made;  // the step that was under way
  bool found_inf = false;
  std::vector<JobPosition> positions;  // by node

  bool AreAllPrepared(bool is_clipped) const {
    for (const JobPosition& each : positions) {
      if (!each.prepared.has_value() || each.prepared->found_inf ||
          each.prepared_is_clipped != is_clipped) {
        return false;
      }
    }
    return true;
  }
};

class KilledRankTest : public SharedOutTest {
 protected:
  KilledRankTest() : SharedOutTest(/*is_ephemeral=*/false) {
    how_.ownership = PartitionMode::kContiguous;
  }

  JobAddress AddressOf(uint32_t node) const {
    JobAddress address;
    address.endpoint = job_.endpoint;
    address.job = OptionsOf(node).job;
    return address;
  }

  // Starts a rank of each node, which takes the step; one of them is killed at
  // an operation of its collective. Returns whether the step has one.
  bool RunUntilKilled(const StepScript::Step& made, bool found_inf,
                      uint32_t killed, uint64_t operation) {
    const absl::StatusOr<Collectives> all = MakeTcpRanks(kNodes);
    EXPECT_TRUE(all.ok()) << all.status();
    if (!all.ok()) return false;
    bool has_ended = false;
    ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
      EndingCollective collective(&each);
      OPTSTATE_ASSIGN_OR_RETURN(SharedRank rank, Attach(collective, how_));
      const bool is_killed = each.rank() == killed;
      if (is_killed) collective.EndAt(operation);
      // One rank alone finds Inf or NaN.
      const absl::StatusOr<Outcome> outcome =
          Take(rank, made, found_inf && each.rank() == kNodes - 1);
      if (!is_killed) return absl::OkStatus();
      has_ended = collective.has_ended();
      EXPECT_EQ(outcome.ok(), !has_ended) << outcome.status();
      return absl::OkStatus();
    }));
    return has_ended;
  }

  // Starts a rank of each node, and ends it again; returns the step that all
  // nodes are at, whose parameters and state are those of the one node.
  // `made`: the step that the one node takes when it lacks the last one.
  uint64_t SettleAndCompare(const Remains& left) {
    const absl::StatusOr<Collectives> all = MakeTcpRanks(kNodes);
    EXPECT_TRUE(all.ok()) << all.status();
    if (!all.ok()) return 0;
    std::vector<SharedRank> ranks(kNodes);
    ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
      OPTSTATE_ASSIGN_OR_RETURN(ranks[each.rank()], Attach(each, how_));
      return absl::OkStatus();
    }));
    if (HasFailure()) return 0;
    const uint64_t step = ranks[0].session->committed_step();
    EXPECT_EQ(ranks[1].session->committed_step(), step);
    if (step > one_->committed_step()) TakeOnOne(left.made, left.found_inf);
    EXPECT_EQ(one_->committed_step(), step);
    for (const SharedRank& each : ranks) {
      ExpectParametersOfOne(each);
      ExpectStateOfOne(*each.session);
    }
    return step;
  }

  // Kills each of the ranks at each operation of a step in turn. `before_next`
  // is called before the next ranks are started. Attempts differ in their
  // gradients.
  void KillEverywhere(
      const std::function<void(const Remains& left)>& before_next) {
    uint64_t attempt = 0;
    bool was_killed = true;
    for (uint64_t operation = 1; was_killed; ++operation) {
      ASSERT_LE(operation, kOperationsMax);
      was_killed = false;
      for (uint32_t killed = 0; killed < kNodes; ++killed) {
        SCOPED_TRACE(
            absl::StrCat("rank ", killed, " ends at operation ", operation));
        const uint64_t step = one_->committed_step() + 1;
        Remains left;
        left.made = MakeRoughStep(step, ++attempt);
        left.found_inf = skips_ && attempt % 3 != 0;
        was_killed |=
            RunUntilKilled(left.made, left.found_inf, killed, operation);
        if (HasFailure()) return;
        for (uint32_t node = 0; node < kNodes; ++node) {
          const absl::StatusOr<JobPosition> position =
              FindPosition(AddressOf(node));
          ASSERT_TRUE(position.ok()) << position.status();
          left.positions.push_back(*position);
        }
        before_next(left);
        const uint64_t now = SettleAndCompare(left);
        if (HasFailure()) return;
        ASSERT_TRUE(now == step || now + 1 == step) << now;
        now == step ? ++taken_ : ++dropped_;
      }
    }
  }

  SharedOutOptions how_;
  bool skips_ = false;  // whether a rank finds Inf or NaN in most steps
  uint64_t taken_ = 0;
  uint64_t dropped_ = 0;
};

TEST_F(KilledRankTest, AStepIsTakenOnAllNodesOrOnNone) {
  uint64_t un_noted = 0;
  uint64_t noted = 0;
  KillEverywhere([&](const Remains& left) {
    un_noted += left.AreAllPrepared(/*is_clipped=*/false);
    noted += left.AreAllPrepared(/*is_clipped=*/true);
  });
  EXPECT_GT(taken_, 0u);
  EXPECT_GT(dropped_, 0u);
  EXPECT_GT(un_noted, 0u);
  EXPECT_GT(noted, 0u);
}

TEST_F(KilledRankTest, AStepIsSkippedOnAllNodesOrOnNone) {
  skips_ = true;
  KillEverywhere([](const Remains&) {});
  EXPECT_GT(taken_, 0u);
  EXPECT_GT(dropped_, 0u);
}

// One daemon has noted the norm when all ranks die.
TEST_F(KilledRankTest, ANormThatOneNodeHasNotedIsThatOfAll) {
  uint64_t brought = 0;
  KillEverywhere([&](const Remains& left) {
    if (!left.AreAllPrepared(/*is_clipped=*/false)) return;
    const Outcome of_one = TakeOnOne(left.made, left.found_inf);
    EXPECT_LT(of_one.clip_coefficient, 1);
    const uint32_t node = ++brought % kNodes;
    const auto noted = BringVerdict(
        AddressOf(node), {.step = left.made.commit.step,
                          .digest = left.positions[node].prepared->digest,
                          .verdict = Verdict::kClip,
                          .gradient_norm = of_one.gradient_norm,
                          .clip_coefficient = of_one.clip_coefficient});
    ASSERT_TRUE(noted.ok()) << noted.status();
    EXPECT_TRUE(noted->prepared);
  });
  EXPECT_GT(brought, 0u);
}

// One daemon has taken the step when all ranks die.
TEST_F(KilledRankTest, AStepThatOneNodeHasTakenIsTakenByAll) {
  uint64_t brought = 0;
  KillEverywhere([&](const Remains& left) {
    if (!left.AreAllPrepared(/*is_clipped=*/true)) return;
    const uint32_t node = ++brought % kNodes;
    const auto taken = BringVerdict(
        AddressOf(node), {.step = left.made.commit.step,
                          .digest = left.positions[node].prepared->digest,
                          .verdict = Verdict::kCommit,
                          .gradient_norm = 0,
                          .clip_coefficient = 1});
    ASSERT_TRUE(taken.ok()) << taken.status();
    EXPECT_FALSE(taken->prepared);
  });
  EXPECT_GT(brought, 0u);
}

// Ranks are started on one node alone, by mistake: it cannot tell before it
// attaches that it lacks parameters, and must not take a step without the norm
// of those.
TEST_F(KilledRankTest, ANodeThatSettlesAloneTakesNoStepThatIsNotNoted) {
  uint64_t un_noted = 0;
  uint64_t noted = 0;
  KillEverywhere([&](const Remains& left) {
    const bool is_noted = left.AreAllPrepared(/*is_clipped=*/true);
    if (!is_noted && !left.AreAllPrepared(/*is_clipped=*/false)) return;
    const absl::StatusOr<Collectives> alone = MakeTcpRanks(1);
    ASSERT_TRUE(alone.ok()) << alone.status();
    ExpectAllOk(OnRanks(*alone, [&](Collective& each) -> absl::Status {
      OPTSTATE_ASSIGN_OR_RETURN(
          const std::unique_ptr<SharedOut> shared,
          SharedOut::Make(&each, PlacesOf(each, 1), layout_, how_));
      SessionOptions options = OptionsOf(0);
      shared->Place(&options);
      return shared->Settle(options);
    }));
    const absl::StatusOr<JobPosition> position = FindPosition(AddressOf(0));
    ASSERT_TRUE(position.ok()) << position.status();
    EXPECT_FALSE(position->prepared.has_value());
    const uint64_t step = left.made.commit.step;
    EXPECT_EQ(position->committed_step, is_noted ? step : step - 1);
    ++(is_noted ? noted : un_noted);
  });
  EXPECT_GT(un_noted, 0u);
  EXPECT_GT(noted, 0u);
}

// The others end between this rank's preparation and its vote.
TEST_F(KilledRankTest, ARankThatHearsNothingSaysThatTheStepIsPrepared) {
  const StepScript::Step made = MakeRoughStep(1, /*draw=*/1);
  std::string said;
  for (uint64_t operation = 1; operation <= kOperationsMax && said.empty();
       ++operation) {
    const absl::StatusOr<Collectives> all = MakeTcpRanks(kNodes);
    ASSERT_TRUE(all.ok()) << all.status();
    ExpectAllOk(OnRanks(*all, [&](Collective& each) -> absl::Status {
      EndingCollective collective(&each);
      OPTSTATE_ASSIGN_OR_RETURN(SharedRank rank, Attach(collective, how_));
      if (each.rank() == 1) collective.EndAt(operation);
      const absl::Status status = Take(rank, made, false).status();
      if (each.rank() == 1) return absl::OkStatus();
      EXPECT_FALSE(status.ok());
      const auto position = FindPosition(AddressOf(0));
      OPTSTATE_RETURN_IF_ERROR(position.status());
      if (!position->prepared.has_value()) return absl::OkStatus();
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      said = std::string(status.message());
      return absl::OkStatus();
    }));
    if (HasFailure()) return;
  }
  EXPECT_THAT(said, HasSubstr("step 1 is prepared on this node"));
  EXPECT_THAT(said, HasSubstr("this rank is killed"));
}

}  // namespace
}  // namespace optstate::client
