// Tests of micro-steps of several ranks, reduced and accumulated by the engine.

#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint32_t kParameters = 4;

LayoutSpec LayoutOf(DType gradient_dtype) {
  LayoutSpec spec;
  spec.groups = {{}, {.options = adam::kAmsgrad}};
  spec.parameters = {
      MakeParameter("a", 100, 0, DType::kBFloat16, gradient_dtype),
      MakeParameter("none", 0, 0, DType::kFloat32, gradient_dtype),
      MakeParameter("b", 13000, 0, DType::kFloat32, gradient_dtype),
      MakeParameter("c", 5000, 1, DType::kFloat32, gradient_dtype)};
  return spec;
}

JobHarness::Setup Together(DType gradient_dtype, uint32_t world_size,
                           uint32_t workers = 2) {
  JobHarness::Setup setup;
  setup.layout = LayoutOf(gradient_dtype);
  setup.world_size = world_size;
  setup.workers = workers;
  setup.partition = PartitionMode::kReplicated;
  setup.accumulate = true;
  return setup;
}

JobHarness::Setup Alone() {
  JobHarness::Setup setup;
  setup.layout = LayoutOf(DType::kFloat32);
  return setup;
}

// The pushes of one rank in one micro-step.
struct Pushed {
  uint64_t seed = 0;
  std::vector<uint32_t> without;
};
// Pushes by micro-step, by rank.
using Script = std::vector<std::vector<Pushed>>;

// Computes the sum by its definition: over micro-steps, of the sums over ranks,
// in float; each sum over micro-steps is rounded to its dtype.
Tensors SumOf(const JobHarness& harness, DType dtype, const Script& script,
              DType sum_dtype) {
  Tensors sums(kParameters);
  for (const std::vector<Pushed>& micro_step : script) {
    Tensors of_ranks(kParameters);
    for (const Pushed& pushed : micro_step) {
      Tensors gradients = harness.RandomTensors(pushed.seed);
      for (uint32_t p = 0; p < kParameters; ++p) {
        if (std::count(pushed.without.begin(), pushed.without.end(), p) != 0) {
          continue;
        }
        std::vector<float>& gradient = gradients[p];
        std::vector<std::byte> rounded(gradient.size() * 4 + 1);
        kernels::CastFromFloat(dtype, gradient.data(), rounded.data(),
                               gradient.size());
        kernels::CastToFloat(dtype, rounded.data(), gradient.data(),
                             gradient.size());
        if (of_ranks[p].empty()) {
          of_ranks[p] = gradient;
        } else {
          for (size_t i = 0; i < gradient.size(); ++i) {
            of_ranks[p][i] += gradient[i];
          }
        }
      }
    }
    for (uint32_t p = 0; p < kParameters; ++p) {
      const size_t numel = of_ranks[p].size();
      if (sums[p].empty()) {
        sums[p] = of_ranks[p];
      } else {
        for (size_t i = 0; i < numel; ++i) sums[p][i] += of_ranks[p][i];
      }
      std::vector<std::byte> rounded(numel * 4 + 1);
      kernels::CastFromFloat(sum_dtype, sums[p].data(), rounded.data(), numel);
      kernels::CastToFloat(sum_dtype, rounded.data(), sums[p].data(), numel);
    }
  }
  return sums;
}

class JobMicroStepsTest : public ::testing::Test {
 protected:
  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    spec.max_norm = 0.5;
    return spec;
  }
  static absl::Status PushMicroStep(JobHarness* harness, uint32_t rank,
                                    uint64_t step, uint32_t micro_step,
                                    const Pushed& pushed) {
    harness->SetGradientsOf(rank, harness->RandomTensors(pushed.seed));
    for (uint32_t p = 0; p < kParameters; ++p) {
      if (std::count(pushed.without.begin(), pushed.without.end(), p) != 0) {
        continue;
      }
      const absl::Status status = harness->Push(rank, step, p, 1, micro_step);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  static void PushScript(JobHarness* harness, uint64_t step,
                         const Script& script) {
    for (uint32_t m = 0; m < script.size(); ++m) {
      for (uint32_t rank = 0; rank < script[m].size(); ++rank) {
        ASSERT_TRUE(
            PushMicroStep(harness, rank, step, m, script[m][rank]).ok());
        harness->EndMicroStep(rank, step, m);
      }
    }
  }
  // Returns the bits that the sum alone gives.
  std::string Expected(DType dtype, const Script& script,
                       DType sum_dtype = DType::kFloat32) const {
    JobHarness plain(Alone());
    plain.Start(plain.RandomTensors(1));
    plain.Step(1, SumOf(plain, dtype, script, sum_dtype), CommitOf(1));
    return plain.StateBytes();
  }
  static bool IsAnswered(const JobHarness& harness, uint32_t rank,
                         uint64_t request) {
    return harness.AnswerTo(rank, request) != nullptr;
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(2, AdamHyperparams());
  const Script script_ = {{{10, {}}, {11, {}}, {12, {}}},
                          {{13, {}}, {14, {}}, {15, {}}},
                          {{16, {}}, {17, {}}, {18, {}}}};
};

TEST_F(JobMicroStepsTest, EqualsTheStepWithTheSum) {
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const AccumulateDType kept :
         {AccumulateDType::kFloat32, AccumulateDType::kGradient}) {
      const std::string expected = Expected(
          dtype, script_,
          kept == AccumulateDType::kGradient ? dtype : DType::kFloat32);
      for (const uint32_t workers : {1, 4}) {
        JobHarness::Setup setup = Together(dtype, 3, workers);
        setup.accumulate_dtype = kept;
        JobHarness harness(setup);
        harness.Start(harness.RandomTensors(1));
        PushScript(&harness, 1, script_);
        EXPECT_TRUE(harness.CommitAll(CommitOf(1)).outcome.applied);
        EXPECT_TRUE(harness.StateBytes() == expected) << workers << " workers";
      }
    }
  }
}

// Rank 1 runs ahead as far as it may, without effect on the bits.
TEST_F(JobMicroStepsTest, TheRanksOrderChangesNoBit) {
  JobHarness harness(Together(DType::kBFloat16, 3));
  harness.Start(harness.RandomTensors(1));
  for (uint32_t m = 0; m < 3; ++m) {
    std::vector<uint64_t> ends(3);
    for (const uint32_t rank : {1, 2, 0}) {
      ASSERT_TRUE(PushMicroStep(&harness, rank, 1, m, script_[m][rank]).ok());
      ends[rank] = harness.EndMicroStep(rank, 1, m);
      EXPECT_EQ(IsAnswered(harness, rank, ends[rank]), rank == 0);
    }
    for (const uint32_t rank : {0, 1, 2}) {
      ASSERT_TRUE(IsAnswered(harness, rank, ends[rank]));
      EXPECT_TRUE(harness.AnswerTo(rank, ends[rank])->status.ok());
    }
  }
  EXPECT_TRUE(harness.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(harness.StateBytes() == Expected(DType::kBFloat16, script_));
}

// The ranks push the parameters of a micro-step in opposite orders: no rank
// waits in a push.
TEST_F(JobMicroStepsTest, PushesOfOppositeOrders) {
  JobHarness harness(Together(DType::kBFloat16, 2));
  harness.Start(harness.RandomTensors(1));
  const Script script = {{{10, {}}, {11, {}}}};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    harness.SetGradientsOf(rank, harness.RandomTensors(10 + rank));
  }
  for (uint32_t i = 0; i < kParameters; ++i) {
    ASSERT_TRUE(harness.Push(0, 1, i, 1).ok());
    ASSERT_TRUE(harness.Push(1, 1, kParameters - 1 - i, 1).ok());
  }
  EXPECT_TRUE(harness.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(harness.StateBytes() == Expected(DType::kBFloat16, script));
}

// This holds also when each rank has a gradient that the other lacks, and the
// ranks wait for each other.
TEST_F(JobMicroStepsTest, ARankWithoutAGradientAddsNothing) {
  JobHarness harness(Together(DType::kBFloat16, 2));
  harness.Start(harness.RandomTensors(1));
  const Script script = {{{10, {2}}, {11, {3}}}, {{12, {0, 2}}, {13, {2, 3}}}};
  PushScript(&harness, 1, script);
  EXPECT_TRUE(harness.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(harness.StateBytes() == Expected(DType::kBFloat16, script));
}

TEST_F(JobMicroStepsTest, AParameterThatNobodyPushedIsLeftAlone) {
  JobHarness harness(Together(DType::kFloat32, 2));
  harness.Start(harness.RandomTensors(1));
  PushScript(&harness, 1, {{{10, {1, 3}}, {11, {1, 3}}}});
  EXPECT_TRUE(harness.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_EQ(harness.StepCounts(), std::vector<int64_t>({1, 0, 1, 0}));
}

// The last rank to commit has taken fewer micro-steps than the others.
TEST_F(JobMicroStepsTest, ACommitEndsAllMicroSteps) {
  JobHarness harness(Together(DType::kBFloat16, 2));
  harness.Start(harness.RandomTensors(1));
  ASSERT_TRUE(PushMicroStep(&harness, 0, 1, 0, {10, {}}).ok());
  ASSERT_TRUE(PushMicroStep(&harness, 1, 1, 0, {11, {}}).ok());
  ASSERT_TRUE(PushMicroStep(&harness, 0, 1, 1, {12, {}}).ok());
  const uint64_t end = harness.EndMicroStep(0, 1, 1);
  EXPECT_FALSE(IsAnswered(harness, 0, end));
  harness.Commit(1, CommitOf(1));
  EXPECT_TRUE(IsAnswered(harness, 0, end));
  harness.Commit(0, CommitOf(1));
  EXPECT_TRUE(harness.StateBytes() ==
              Expected(DType::kBFloat16, {{{10, {}}, {11, {}}}, {{12, {}}}}));
}

TEST_F(JobMicroStepsTest, ARepeatChangesNothing) {
  JobHarness harness(Together(DType::kBFloat16, 2));
  harness.Start(harness.RandomTensors(1));
  const Script script = {{{10, {}}, {11, {}}}, {{12, {}}, {13, {}}}};
  for (uint32_t m = 0; m < 2; ++m) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      for (int repeat = 0; repeat < 2; ++repeat) {
        ASSERT_TRUE(PushMicroStep(&harness, rank, 1, m, script[m][rank]).ok());
      }
    }
    // The area, which is the rank's again by now, has other bytes.
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(PushMicroStep(&harness, rank, 1, m, {99, {}}).ok());
    }
  }
  EXPECT_TRUE(harness.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(harness.StateBytes() == Expected(DType::kBFloat16, script));
}

TEST_F(JobMicroStepsTest, TheNextMicroStepMustWait) {
  JobHarness harness(Together(DType::kBFloat16, 2));
  harness.Start(harness.RandomTensors(1));
  ASSERT_TRUE(harness.Push(0, 1, 0, 4, 0).ok());
  const absl::Status early = harness.Push(0, 1, 0, 4, 1);
  EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(early.message(), HasSubstr("end that micro-step"));
  const uint64_t end = harness.EndMicroStep(0, 1, 0);
  const auto* twice = harness.AnswerTo(0, harness.EndMicroStep(0, 1, 0));
  ASSERT_NE(twice, nullptr);
  EXPECT_EQ(twice->status.code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(harness.Push(1, 1, 0, 4, 0).ok());
  EXPECT_TRUE(IsAnswered(harness, 0, end));
  EXPECT_TRUE(harness.Push(0, 1, 0, 4, 1).ok());
}

// A rank can drop its unsummed gradients without effect on others.
TEST_F(JobMicroStepsTest, ARankMayDropWhatIsNotSummed) {
  JobHarness harness(Together(DType::kBFloat16, 2));
  harness.Start(harness.RandomTensors(1));
  ASSERT_TRUE(PushMicroStep(&harness, 0, 1, 0, {10, {}}).ok());
  const uint64_t end = harness.EndMicroStep(0, 1, 0);
  harness.SetGradientsOf(1, harness.RandomTensors(99));
  harness.Detach(1);
  ASSERT_TRUE(harness.Register(1).ok());
  ASSERT_TRUE(harness.Attach(1).ok());
  EXPECT_FALSE(IsAnswered(harness, 0, end));
  ASSERT_TRUE(PushMicroStep(&harness, 1, 1, 0, {11, {}}).ok());
  EXPECT_TRUE(harness.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(harness.StateBytes() ==
              Expected(DType::kBFloat16, {{{10, {}}, {11, {}}}}));
}

class LosesSums : public JobMicroStepsTest {
 protected:
  LosesSums() {
    harness_.Start(harness_.RandomTensors(1));
    PushScript(&harness_, 1, {{{50, {}}, {51, {}}, {52, {}}}});
  }
  void ExpectAborted(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(status.message(), HasSubstr("rank 1 was lost or has aborted"));
    EXPECT_THAT(status.message(), HasSubstr("its first micro-step"));
  }
  // Expects that the step starts anew after each rank has aborted.
  void ExpectStepAnew() {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(harness_.job().Abort(rank, 1).ok());
    }
    PushScript(&harness_, 1, script_);
    EXPECT_TRUE(harness_.CommitAll(CommitOf(1)).outcome.applied);
    EXPECT_TRUE(harness_.StateBytes() == Expected(DType::kBFloat16, script_));
  }

  JobHarness harness_{Together(DType::kBFloat16, 3)};
};

TEST_F(LosesSums, AnAbortIsToldToWhoPushes) {
  ASSERT_TRUE(harness_.job().Abort(1, 1).ok());
  ExpectAborted(harness_.Push(0, 1, 0, 4, 1));
  ExpectAborted(harness_.Push(0, 1, 0, 4, 0));
  const auto* ended = harness_.AnswerTo(2, harness_.EndMicroStep(2, 1, 1));
  ASSERT_NE(ended, nullptr);
  ExpectAborted(ended->status);
  const auto* committed = harness_.AnswerTo(2, harness_.Commit(2, CommitOf(1)));
  ASSERT_NE(committed, nullptr);
  ExpectAborted(committed->status);
  EXPECT_TRUE(harness_.Push(1, 1, 0, 4, 0).ok()) << "it knows";
  ExpectStepAnew();
}

TEST_F(LosesSums, ALostRankIsToldToWhoWaits) {
  ASSERT_TRUE(harness_.Push(0, 1, 0, 4, 1).ok());
  const uint64_t end = harness_.EndMicroStep(0, 1, 1);
  const uint64_t commit = harness_.Commit(2, CommitOf(1));
  EXPECT_FALSE(IsAnswered(harness_, 0, end));
  harness_.Detach(1);
  ASSERT_TRUE(IsAnswered(harness_, 0, end));
  ExpectAborted(harness_.AnswerTo(0, end)->status);
  ASSERT_TRUE(IsAnswered(harness_, 2, commit));
  ExpectAborted(harness_.AnswerTo(2, commit)->status);
  ASSERT_TRUE(harness_.Register(1).ok());
  const auto attached = harness_.Attach(1);
  ASSERT_TRUE(attached.ok());
  EXPECT_TRUE(attached->staged.empty());
  ExpectStepAnew();
}

// With on_rank_loss: abort, ranks are notified of the dropped sums. A rank that
// has aborted and takes the step again waits for the lost rank, as after any
// other loss.
TEST_F(JobMicroStepsTest, ALossThatTookSumsIsToldOnce) {
  JobHarness::Setup setup = Together(DType::kBFloat16, 3);
  setup.on_rank_loss = v1::RANK_LOSS_ABORT;
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  PushScript(&harness, 1, {{{50, {}}, {51, {}}, {52, {}}}});
  const uint64_t waits = harness.Commit(0, CommitOf(1));
  harness.Detach(1);
  ASSERT_TRUE(IsAnswered(harness, 0, waits));
  EXPECT_EQ(harness.AnswerTo(0, waits)->status.code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(harness.Push(2, 1, 0, 4, 1).code(), absl::StatusCode::kAborted);
  std::vector<uint64_t> ends(3);
  for (const uint32_t rank : {0, 2}) {
    ASSERT_TRUE(harness.job().Abort(rank, 1).ok());
    ASSERT_TRUE(PushMicroStep(&harness, rank, 1, 0, script_[0][rank]).ok());
    ends[rank] = harness.EndMicroStep(rank, 1, 0);
    EXPECT_FALSE(IsAnswered(harness, rank, ends[rank]))
        << harness.AnswerTo(rank, ends[rank])->status;
    EXPECT_THAT(harness.NoticesTo(rank),
                ElementsAre(HasSubstr("rank 1 lost at step 1")));
  }
  ASSERT_TRUE(harness.Register(1).ok());
  ASSERT_TRUE(harness.Attach(1).ok());
  ASSERT_TRUE(PushMicroStep(&harness, 1, 1, 0, script_[0][1]).ok());
  ends[1] = harness.EndMicroStep(1, 1, 0);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(IsAnswered(harness, rank, ends[rank]));
    EXPECT_TRUE(harness.AnswerTo(rank, ends[rank])->status.ok());
  }
  EXPECT_TRUE(harness.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(harness.StateBytes() == Expected(DType::kBFloat16, {script_[0]}));
}

// A rank that has aborted may be ahead of those that have not been told yet.
TEST_F(LosesSums, TheStepBeginsOnceAllHaveAborted) {
  ASSERT_TRUE(harness_.job().Abort(1, 1).ok());
  ASSERT_TRUE(PushMicroStep(&harness_, 1, 1, 0, script_[0][1]).ok());
  const uint64_t end = harness_.EndMicroStep(1, 1, 0);
  for (const uint32_t rank : {0, 2}) {
    ExpectAborted(harness_.Push(rank, 1, 0, 4, 1));
    ASSERT_TRUE(harness_.job().Abort(rank, 1).ok());
    EXPECT_FALSE(IsAnswered(harness_, 1, end));
    ASSERT_TRUE(PushMicroStep(&harness_, rank, 1, 0, script_[0][rank]).ok());
  }
  EXPECT_TRUE(IsAnswered(harness_, 1, end));
  EXPECT_TRUE(harness_.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(harness_.StateBytes() ==
              Expected(DType::kBFloat16, {script_[0]}));
}

TEST_F(LosesSums, AStepThatIsRefusedLeavesNothing) {
  CommitSpec other = CommitOf(1);
  other.max_norm = 2;
  harness_.Commit(0, CommitOf(1));
  harness_.Commit(1, CommitOf(1));
  const auto* answer = harness_.AnswerTo(2, harness_.Commit(2, other));
  ASSERT_NE(answer, nullptr);
  EXPECT_EQ(answer->status.code(), absl::StatusCode::kFailedPrecondition);
  PushScript(&harness_, 1, script_);
  EXPECT_TRUE(harness_.CommitAll(CommitOf(1)).outcome.applied);
  EXPECT_TRUE(harness_.StateBytes() == Expected(DType::kBFloat16, script_));
}

TEST_F(JobMicroStepsTest, WithoutAccumulationAMicroStepEndsAtOnce) {
  JobHarness harness([] {
    JobHarness::Setup setup = Together(DType::kFloat32, 2);
    setup.accumulate = false;
    return setup;
  }());
  harness.Start(harness.RandomTensors(1));
  ASSERT_TRUE(harness.Push(0, 1, 0, 4).ok());
  const auto* end = harness.AnswerTo(0, harness.EndMicroStep(0, 1, 0));
  ASSERT_NE(end, nullptr);
  EXPECT_TRUE(end->status.ok());
  const auto* wrong = harness.AnswerTo(0, harness.EndMicroStep(0, 7, 0));
  ASSERT_NE(wrong, nullptr);
  EXPECT_EQ(wrong->status.code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace optstate::session
