// Tests of ranks whose gradients the engine sums when some ranks lack some.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

// The parameters without a gradient, by rank. "b" has a gradient of rank 2
// alone, "c" of no rank.
const std::vector<std::vector<uint32_t>> kWithout = {{1, 3}, {0, 1, 3}, {3}};
constexpr uint32_t kRanks = 3;

JobHarness::Setup Summed(uint32_t world_size, uint32_t workers = 2) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 13000), MakeParameter("b", 300),
                             MakeParameter("both", 5000),
                             MakeParameter("c", 100)};
  setup.world_size = world_size;
  setup.workers = workers;
  if (world_size > 1) setup.partition = PartitionMode::kReplicated;
  return setup;
}

bool Lacks(uint32_t rank, uint32_t parameter) {
  return std::count(kWithout[rank].begin(), kWithout[rank].end(), parameter) !=
         0;
}

class JobMissingGradientsTest : public ::testing::Test {
 protected:
  CommitSpec CommitOf(double norm_type = 2) const {
    CommitSpec spec;
    spec.step = 1;
    spec.groups = groups_;
    spec.max_norm = 0.5;
    spec.norm_type = norm_type;
    return spec;
  }
  static void PushThoseThereAre(JobHarness* harness,
                                const std::vector<uint32_t>& ranks = {0, 1,
                                                                      2}) {
    for (const uint32_t rank : ranks) {
      harness->SetGradientsOf(rank, harness->RandomTensors(10 + rank));
      for (uint32_t p = 0; p < 4; ++p) {
        if (Lacks(rank, p)) continue;
        const absl::Status pushed = harness->Push(rank, 1, p, 1);
        ASSERT_TRUE(pushed.ok()) << pushed;
      }
    }
  }
  // Returns the answer of one rank that has the sums of the existing gradients.
  RecordingListener::Answer Expected(double norm_type, std::string* state) {
    JobHarness plain(Summed(1));
    plain.Start(plain.RandomTensors(1));
    Tensors sums(4);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const Tensors gradients = plain.RandomTensors(10 + rank);
      for (uint32_t p = 0; p < 4; ++p) {
        if (Lacks(rank, p)) continue;
        sums[p].resize(gradients[p].size());
        for (size_t i = 0; i < gradients[p].size(); ++i) {
          sums[p][i] += gradients[p][i];
        }
      }
    }
    sums[3].resize(100);
    plain.SetGradients(sums);
    plain.PushAll(1, 0, {3});
    RecordingListener::Answer answer = plain.CommitAll(CommitOf(norm_type));
    *state = plain.StateBytes();
    return answer;
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(1, AdamHyperparams());
};

TEST_F(JobMissingGradientsTest, TheOthersAreSummedForAllNorms) {
  for (const double norm_type :
       {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    std::string expected;
    const auto alone = Expected(norm_type, &expected);
    for (const uint32_t workers : {1, 4}) {
      JobHarness harness(Summed(kRanks, workers));
      harness.Start(harness.RandomTensors(1));
      PushThoseThereAre(&harness);
      const auto answer = harness.CommitAll(CommitOf(norm_type));
      ASSERT_TRUE(answer.status.ok()) << answer.status;
      EXPECT_EQ(answer.outcome.gradient_norm, alone.outcome.gradient_norm);
      EXPECT_LT(answer.outcome.clip_coefficient, 1);
      EXPECT_TRUE(harness.StateBytes() == expected) << norm_type;
      EXPECT_EQ(harness.StepCounts(), (std::vector<int64_t>{1, 1, 1, 0}));
    }
  }
}

// The last rank to commit may still push.
TEST_F(JobMissingGradientsTest, TheRanksOrderChangesNoBit) {
  std::string expected;
  Expected(2, &expected);
  JobHarness harness(Summed(kRanks));
  harness.Start(harness.RandomTensors(1));
  for (const uint32_t rank : {2, 0, 1}) {
    PushThoseThereAre(&harness, {rank});
    harness.Commit(rank, CommitOf());
  }
  EXPECT_TRUE(harness.StateBytes() == expected);
}

// Gradients missing in one step are pushed in the next.
TEST_F(JobMissingGradientsTest, TheNextStepMayHaveAll) {
  JobHarness harness(Summed(kRanks));
  harness.Start(harness.RandomTensors(1));
  PushThoseThereAre(&harness);
  ASSERT_TRUE(harness.CommitAll(CommitOf()).status.ok());
  CommitSpec spec = CommitOf();
  spec.step = 2;
  harness.Step(2, harness.RandomTensors(5), spec);
  EXPECT_EQ(harness.StepCounts(), (std::vector<int64_t>{2, 2, 2, 1}));
}

// One rank has NaN in gradients that another rank lacks.
TEST_F(JobMissingGradientsTest, AnOverflowIsSeenThere) {
  JobHarness harness(Summed(kRanks));
  harness.Start(harness.RandomTensors(1));
  const std::string before = harness.StateBytes();
  PushThoseThereAre(&harness, {0, 1});
  Tensors gradients = harness.RandomTensors(12);
  gradients[1][299] = std::nanf("");
  harness.SetGradientsOf(2, gradients);
  ASSERT_TRUE(harness.Push(2, 1, 0, 3).ok());
  const auto answer = harness.CommitAll(CommitOf());
  EXPECT_TRUE(answer.outcome.found_inf);
  EXPECT_FALSE(answer.outcome.applied);
}

TEST_F(JobMissingGradientsTest, TooManyRanksMustAllPush) {
  JobHarness harness(Summed(65));
  harness.Start(harness.RandomTensors(1));
  ASSERT_TRUE(harness.Push(64, 1, 2, 1).ok());
  EXPECT_THAT(harness.CommitAll(CommitOf()).status.message(),
              HasSubstr("1 of 65 pieces of parameter 2"));
}

}  // namespace
}  // namespace optstate::session
