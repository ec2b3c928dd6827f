#include "client/collective/nodes/resolution.h"

#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/collective/nodes/job_facts.h"
#include "client/collective/nodes/places.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::Pair;

using Votes = std::vector<std::optional<NodeStep>>;
using Positions = std::vector<std::optional<NodePosition>>;

constexpr uint64_t kDigest = 0xABC;

// A node at a step, which it has taken in two phases.
NodePosition At(uint64_t step) {
  NodePosition position;
  position.committed = {.step = step, .digest = step == 0 ? 0 : kDigest + step};
  position.loads_finished = 1;
  return position;
}

// A node at `step` that has prepared the next one.
NodePosition Prepared(uint64_t step) {
  NodePosition position = At(step);
  position.prepared = NodeStep{.step = step + 1, .digest = kDigest + step + 1};
  return position;
}

absl::StatusOr<std::map<size_t, Verdict>> ResolveThree(
    const Positions& positions) {
  const std::vector<std::string> names = {"a", "b", "c"};
  return Resolve(positions,
                 absl::MakeConstSpan(names).subspan(0, positions.size()));
}

std::map<size_t, Verdict> Resolved(const Positions& positions) {
  const auto verdicts = ResolveThree(positions);
  EXPECT_TRUE(verdicts.ok()) << verdicts.status();
  return verdicts.value_or(std::map<size_t, Verdict>());
}

std::string Refusal(const Positions& positions) {
  const absl::Status status = ResolveThree(positions).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  return std::string(status.message());
}

TEST(DecideVotes, TheTableOfTheRanks) {
  const NodeStep vote = {.step = 3, .digest = 9};
  NodeStep other_step = vote;
  other_step.step = 4;
  NodeStep other_digest = vote;
  other_digest.digest = 10;
  NodeStep inf = vote;
  inf.found_inf = true;
  EXPECT_EQ(DecideVotes(Votes{vote}), Verdict::kCommit);
  EXPECT_EQ(DecideVotes(Votes{vote, vote, vote}), Verdict::kCommit);
  EXPECT_EQ(DecideVotes(Votes{vote, inf, vote}), Verdict::kSkip);
  EXPECT_EQ(DecideVotes(Votes{inf, vote, vote}), Verdict::kSkip);
  EXPECT_EQ(DecideVotes(Votes{vote, other_step}), Verdict::kAbort);
  EXPECT_EQ(DecideVotes(Votes{vote, other_digest}), Verdict::kAbort);
  EXPECT_EQ(DecideVotes(Votes{inf, other_digest}), Verdict::kAbort);
  EXPECT_EQ(DecideVotes(Votes{std::nullopt, vote}), Verdict::kAbort);
  EXPECT_EQ(DecideVotes(Votes{vote, std::nullopt}), Verdict::kAbort);
  EXPECT_EQ(DecideVotes(Votes{std::nullopt}), Verdict::kAbort);
}

TEST(Resolve, NodesAtOneStepGoOn) {
  EXPECT_THAT(Resolved({std::nullopt, std::nullopt}), IsEmpty());
  EXPECT_THAT(Resolved({At(5), At(5), At(5)}), IsEmpty());
  EXPECT_THAT(Resolved({At(0), At(0)}), IsEmpty());
  // Nothing is loaded on one: the ranks are going to load.
  NodePosition empty;
  EXPECT_THAT(Resolved({At(0), empty}), IsEmpty());
  EXPECT_THAT(Resolved({At(0), std::nullopt}), IsEmpty());
}

TEST(Resolve, AStepThatAllHavePreparedIsTaken) {
  EXPECT_THAT(
      Resolved({Prepared(5), Prepared(5)}),
      ElementsAre(Pair(0, Verdict::kCommit), Pair(1, Verdict::kCommit)));
  NodePosition inf = Prepared(5);
  inf.prepared->found_inf = true;
  EXPECT_THAT(Resolved({Prepared(5), inf}),
              ElementsAre(Pair(0, Verdict::kSkip), Pair(1, Verdict::kSkip)));
}

TEST(Resolve, AStepThatSomeHaveNotPreparedIsDropped) {
  EXPECT_THAT(Resolved({At(5), Prepared(5)}),
              ElementsAre(Pair(1, Verdict::kAbort)));
  NodePosition other = Prepared(5);
  other.prepared->digest = 1;
  EXPECT_THAT(Resolved({other, Prepared(5)}),
              ElementsAre(Pair(0, Verdict::kAbort), Pair(1, Verdict::kAbort)));
}

TEST(Resolve, AStepThatSomeHaveTakenIsTakenByAll) {
  EXPECT_THAT(Resolved({At(6), Prepared(5), At(6)}),
              ElementsAre(Pair(1, Verdict::kCommit)));
  NodePosition skipped = At(6);
  skipped.committed.found_inf = true;
  EXPECT_THAT(Resolved({Prepared(5), skipped}),
              ElementsAre(Pair(0, Verdict::kSkip)));
  // The step after it is for the next round.
  EXPECT_THAT(Resolved({Prepared(6), Prepared(5)}),
              ElementsAre(Pair(1, Verdict::kCommit)));
}

// Their digests differ, and none knows the norm of all gradients by itself.
TEST(Resolve, NodesThatHoldOtherParametersNoteTheNorm) {
  const NodesNorm norm = {.gradient_norm = 3, .clip_coefficient = 0.5};
  const std::vector<std::string> names = {"a", "b"};
  const std::vector<uint32_t> kinds = {0, 1};
  const auto resolved = [&](const Positions& positions) {
    const auto verdicts = Resolve(positions, names, kinds);
    EXPECT_TRUE(verdicts.ok()) << verdicts.status();
    return verdicts.value_or(std::map<size_t, Verdict>());
  };
  const NodePosition mine = Prepared(5);
  NodePosition mine_noted = mine;
  mine_noted.prepared->norm = norm;
  NodePosition other = Prepared(5);
  other.prepared->digest = 1;
  NodePosition other_noted = other;
  other_noted.prepared->norm = norm;
  EXPECT_EQ(DecideVotes(Votes{mine.prepared, other.prepared}, kinds),
            Verdict::kCommit);
  // Nobody can have committed a step whose norm no node has noted.
  EXPECT_THAT(resolved({mine, other}),
              ElementsAre(Pair(0, Verdict::kAbort), Pair(1, Verdict::kAbort)));
  EXPECT_FALSE(NotedNorm(Positions{mine, other}).has_value());
  EXPECT_THAT(resolved({mine, other_noted}),
              ElementsAre(Pair(0, Verdict::kClip)));
  const std::optional<NodesNorm> noted =
      NotedNorm(Positions{mine, other_noted});
  ASSERT_TRUE(noted.has_value());
  EXPECT_EQ(noted->gradient_norm, norm.gradient_norm);
  EXPECT_EQ(noted->clip_coefficient, norm.clip_coefficient);
  EXPECT_THAT(
      resolved({mine_noted, other_noted}),
      ElementsAre(Pair(0, Verdict::kCommit), Pair(1, Verdict::kCommit)));
  EXPECT_THAT(resolved({At(6), other_noted}),
              ElementsAre(Pair(1, Verdict::kCommit)));
  EXPECT_THAT(resolved({At(6), other}), ElementsAre(Pair(1, Verdict::kClip)));
  NodePosition inf = other;
  inf.prepared->found_inf = true;
  EXPECT_THAT(resolved({mine_noted, inf}),
              ElementsAre(Pair(0, Verdict::kSkip), Pair(1, Verdict::kSkip)));
}

TEST(Resolve, NodesThatCannotCatchUpAreNamed) {
  EXPECT_THAT(Refusal({At(6), At(5)}),
              HasSubstr("a: step 6, 1 loads; b: step"));
  EXPECT_THAT(Refusal({At(6), std::nullopt}), HasSubstr("b: no such job"));
  EXPECT_THAT(Refusal({At(7), Prepared(5)}), HasSubstr("step 6 prepared"));
  NodePosition other = Prepared(5);
  other.prepared->digest = 1;
  EXPECT_THAT(Refusal({At(6), other}), HasSubstr("all nodes had step 5"));
  NodePosition durable = At(4);
  durable.durable_step = 4;
  EXPECT_THAT(Refusal({At(6), durable}), HasSubstr("durable step 4"));
  EXPECT_THAT(Refusal({At(6), durable}), Not(HasSubstr("--to-durable")));
  NodePosition later = At(6);
  later.durable_step = 4;
  EXPECT_THAT(Refusal({later, durable}),
              HasSubstr("go back to step 4, which is durable on all"));
  later.durable_step = 5;
  EXPECT_THAT(Refusal({later, durable}), Not(HasSubstr("--to-durable")));
}

TEST(Resolve, TheOnesThatDifferAreNamedAmongMany) {
  constexpr size_t kMany = 1000;
  Positions positions(kMany, At(6));
  std::vector<std::string> names;
  for (size_t node = 0; node < kMany; ++node) {
    names.push_back(absl::StrCat("n", node));
  }
  positions[700] = std::nullopt;
  const absl::Status one = Resolve(positions, names).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(one)) << one;
  EXPECT_THAT(std::string(one.message()),
              HasSubstr("(n0: step 6, 1 loads; n700: no such job, 0 loads; 998 "
                        "are as n0 is)"));
  for (size_t node = 100; node < kMany; ++node) positions[node] = At(5);
  const absl::Status most = Resolve(positions, names).status();
  EXPECT_THAT(std::string(most.message()), HasSubstr("n106: step 5"));
  EXPECT_THAT(std::string(most.message()), HasSubstr("893 are not named"));
  EXPECT_LT(most.message().size(), 1000u);
}

TEST(Resolve, NodesOfSeveralRunsAreRefused) {
  NodePosition other = At(6);
  other.committed.digest = 1;
  EXPECT_THAT(Refusal({At(6), other}), HasSubstr("begin it again"));
  NodePosition one_phase = At(6);
  one_phase.committed.digest = 0;
  Refusal({At(6), one_phase});
  NodePosition skipped = At(6);
  skipped.committed.found_inf = true;
  Refusal({At(6), skipped});
  NodePosition loaded = At(6);
  loaded.loads_finished = 2;
  EXPECT_THAT(Refusal({At(6), loaded}), HasSubstr("a load of state"));
}

TEST(Places, RanksOfANodeAreCounted) {
  const auto places = Places::Make({"x", "y", "x", "y"}, 3);
  ASSERT_TRUE(places.ok()) << places.status();
  EXPECT_THAT(places->nodes(), ElementsAre("x", "y"));
  EXPECT_THAT(places->first_ranks(), ElementsAre(0, 1));
  EXPECT_EQ(places->node(), 1u);
  EXPECT_EQ(places->node_name(), "y");
  EXPECT_EQ(places->local_rank(), 1u);
  EXPECT_EQ(places->local_world_size(), 2u);
  EXPECT_FALSE(places->is_first_rank());
  const auto uneven = Places::Make({"x", "y", "x"}, 0);
  EXPECT_TRUE(absl::IsInvalidArgument(uneven.status())) << uneven.status();
  EXPECT_THAT(std::string(uneven.status().message()), HasSubstr("y has 1"));
}

TEST(NodeName, IsChosenOrTheKernels) {
  ASSERT_EQ(setenv("OPTSTATE_NODE", "left", 1), 0);
  EXPECT_EQ(*NodeName(), "left");
  ASSERT_EQ(unsetenv("OPTSTATE_NODE"), 0);
  const auto name = NodeName();
  ASSERT_TRUE(name.ok()) << name.status();
  EXPECT_EQ(name->size(), 36u);  // a UUID
}

TEST(JobFacts, EverySettingOfAStepIsThere) {
  SessionOptions options;
  options.layout.groups = {{.options = 0}};
  options.layout.parameters = {{.name = "w",
                                .shape = {2, 3},
                                .numel = 6,
                                .dtype = DType::kBFloat16,
                                .gradient_dtype = DType::kFloat32,
                                .group = 0}};
  const std::string facts = JobFacts(options);
  EXPECT_THAT(facts, HasSubstr("parameter \"w\" of shape [2 3] bfloat16 with "
                               "gradients float32 in group 0"));
  const auto differs = [&](auto change) {
    SessionOptions other = options;
    change(&other);
    EXPECT_NE(JobFacts(other), facts);
  };
  differs([](auto* o) { o->layout.optimizer = OptimizerKind::kLion; });
  differs([](auto* o) { o->layout.state_format = StateFormat::kDynamic8; });
  differs([](auto* o) { o->layout.master_format = MasterFormat::kSplit; });
  differs([](auto* o) { o->layout.groups[0].options = 1; });
  differs([](auto* o) { o->layout.parameters[0].shape = {3, 2}; });
  differs([](auto* o) { o->partition = PartitionMode::kContiguous; });
  differs([](auto* o) { o->accumulate = true; });
  differs([](auto* o) { o->loss_scaler = LossScaler(); });
  // Settings of one node alone may differ.
  SessionOptions elsewhere = options;
  elsewhere.endpoint = "unix:/other";
  EXPECT_EQ(JobFacts(elsewhere), facts);
}

}  // namespace
}  // namespace optstate::client
