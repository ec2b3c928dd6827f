// Tests the rules of a step, one by one.

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

// "b" is cut between two ranks when contiguous; "none" has no elements.
LayoutSpec SmallLayout() {
  LayoutSpec spec;
  spec.groups = {{}, {.options = adam::kAmsgrad}};
  spec.parameters = {
      MakeParameter("a", 100), MakeParameter("none", 0),
      MakeParameter("b", 9000),
      MakeParameter("c", 5000, 1, DType::kBFloat16, DType::kBFloat16),
      MakeParameter("one", 1, 1)};
  return spec;
}

constexpr uint32_t kNone = 1;
constexpr uint32_t kB = 2;
constexpr uint32_t kC = 3;

struct CommitOfTwoGroups {
  std::vector<Hyperparams> groups =
      std::vector<Hyperparams>(2, AdamHyperparams());
  CommitSpec Of(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    return spec;
  }
};

JobHarness::Setup TwoRanks(PartitionMode mode = PartitionMode::kGreedy) {
  JobHarness::Setup setup;
  setup.layout = SmallLayout();
  setup.world_size = 2;
  setup.partition = mode;
  return setup;
}

class JobStepsTest : public ::testing::Test {
 protected:
  explicit JobStepsTest(JobHarness::Setup setup = TwoRanks())
      : harness_(std::move(setup)) {
    harness_.Start(harness_.RandomTensors(1));
    harness_.SetGradients(harness_.RandomTensors(2));
  }
  uint32_t count() const {
    return static_cast<uint32_t>(harness_.layout().parameters().size());
  }

  CommitOfTwoGroups commit_;
  JobHarness harness_;
};

class ContiguousStepsTest : public JobStepsTest {
 protected:
  ContiguousStepsTest() : JobStepsTest(TwoRanks(PartitionMode::kContiguous)) {}
};

TEST_F(JobStepsTest, StepsCountUpFromOne) {
  for (uint64_t step = 1; step <= 3; ++step) {
    harness_.PushAll(step);
    const auto answer = harness_.CommitAll(commit_.Of(step));
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.outcome.step, step);
    EXPECT_TRUE(answer.outcome.applied);
    EXPECT_EQ(harness_.job().Describe().committed_step(), step);
  }
  EXPECT_EQ(harness_.StepCounts(), std::vector<int64_t>(count(), 3));
}

TEST_F(JobStepsTest, StepsOutOfOrderAreRefused) {
  for (const uint64_t step : {0, 2, 7}) {
    EXPECT_EQ(harness_.Push(0, step, 0, count()).code(),
              absl::StatusCode::kFailedPrecondition);
    const uint64_t request = harness_.Commit(0, commit_.Of(step));
    const auto* answer = harness_.AnswerTo(0, request);
    ASSERT_NE(answer, nullptr);
    EXPECT_EQ(answer->status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(answer->status.message(), HasSubstr("the next is 1"));
  }
}

TEST_F(JobStepsTest, CommitWaitsForAllRanks) {
  harness_.PushAll(1);
  const uint64_t first = harness_.Commit(0, commit_.Of(1));
  EXPECT_EQ(harness_.AnswerTo(0, first), nullptr);
  EXPECT_EQ(harness_.job().Describe().open_step(),
            "step 1: rank 1 has not committed");
  const uint64_t second = harness_.Commit(1, commit_.Of(1));
  ASSERT_NE(harness_.AnswerTo(0, first), nullptr);
  ASSERT_NE(harness_.AnswerTo(1, second), nullptr);
  EXPECT_TRUE(harness_.AnswerTo(0, first)->status.ok());
  EXPECT_EQ(harness_.job().Describe().open_step(), "");
}

TEST_F(JobStepsTest, NoPushAfterCommit) {
  harness_.PushAll(1);
  harness_.Commit(0, commit_.Of(1));
  const absl::Status status = harness_.Push(0, 1, 0, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("rank 0 has committed step 1"));
  const uint64_t again = harness_.Commit(0, commit_.Of(1));
  ASSERT_NE(harness_.AnswerTo(0, again), nullptr);
  EXPECT_EQ(harness_.AnswerTo(0, again)->status.code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(JobStepsTest, RangesOutsideTheLayoutAreRefused) {
  EXPECT_EQ(harness_.Push(0, 1, count(), 1).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(harness_.Push(0, 1, 0, count() + 1).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(harness_.Push(0, 1, UINT32_MAX, UINT32_MAX).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(harness_.Push(0, 1, count(), 0).ok());
}

TEST_F(JobStepsTest, NoGradientMeansNoUpdateAndNoCount) {
  harness_.PushAll(1);
  harness_.CommitAll(commit_.Of(1));
  const auto before = harness_.Fetch(v1::STATE_ARRAY_MASTER, kB);
  const auto moment = harness_.Fetch(v1::STATE_ARRAY_STATE_0, kB);
  harness_.PushAll(2, 0, {kB});
  ASSERT_TRUE(harness_.CommitAll(commit_.Of(2)).outcome.applied);
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_MASTER, kB), before);
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_STATE_0, kB), moment);
  EXPECT_EQ(harness_.StepCounts(), (std::vector<int64_t>{2, 2, 1, 2, 2}));
}

TEST_F(JobStepsTest, AStepWithoutAnyGradientIsAStep) {
  const std::string before = harness_.StateBytes();
  const auto answer = harness_.CommitAll(commit_.Of(1));
  EXPECT_TRUE(answer.outcome.applied);
  EXPECT_EQ(answer.outcome.gradient_norm, 0);
  EXPECT_EQ(harness_.StateBytes(), before);
  EXPECT_EQ(harness_.job().Describe().committed_step(), 1);
}

TEST_F(ContiguousStepsTest, APartOfAParameterIsRefusedToAll) {
  const std::string before = harness_.StateBytes();
  ASSERT_TRUE(harness_.Push(0, 1, 0, count()).ok());
  const auto answer = harness_.CommitAll(commit_.Of(1));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(answer.status.message(), HasSubstr("1 of 2 pieces"));
  EXPECT_THAT(answer.status.message(), HasSubstr("\"b\""));
  EXPECT_EQ(harness_.StateBytes(), before);
  // The content was dropped, so the same step can be taken.
  harness_.PushAll(1);
  EXPECT_TRUE(harness_.CommitAll(commit_.Of(1)).outcome.applied);
}

TEST_F(JobStepsTest, UnequalCommitsAreRefusedToAll) {
  const std::string before = harness_.StateBytes();
  CommitOfTwoGroups other;
  other.groups[1][adam::kLr] = 1e-3 * (1 + 1e-15);
  harness_.PushAll(1);
  const uint64_t a = harness_.Commit(0, commit_.Of(1));
  const uint64_t b = harness_.Commit(1, other.Of(1));
  for (const auto* answer :
       {harness_.AnswerTo(0, a), harness_.AnswerTo(1, b)}) {
    ASSERT_NE(answer, nullptr);
    EXPECT_EQ(answer->status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(answer->status.message(), HasSubstr("lr of group 1 is 0.001"));
    EXPECT_THAT(answer->status.message(), HasSubstr("0.0010000000000000"));
  }
  EXPECT_EQ(harness_.StateBytes(), before);
  EXPECT_EQ(harness_.job().Describe().open_step(), "");
  // Staged gradients are gone: a commit now is a step without gradients.
  EXPECT_TRUE(harness_.CommitAll(commit_.Of(1)).outcome.applied);
  EXPECT_EQ(harness_.StateBytes(), before);
}

TEST_F(JobStepsTest, BadContentIsRefusedToTheOneAndTheStepStaysOpen) {
  struct Case {
    CommitSpec spec;
    const char* text;
  };
  CommitOfTwoGroups bad_lr;
  bad_lr.groups[1][adam::kLr] = kInf;
  CommitOfTwoGroups one_group;
  one_group.groups.resize(1);
  std::vector<Case> cases = {{bad_lr.Of(1), "group 1: Invalid learning rate"},
                             {one_group.Of(1), "1 groups, the job has 2"},
                             {commit_.Of(1), "Invalid grad_scale"},
                             {commit_.Of(1), "Invalid grad_scale"},
                             {commit_.Of(1), "Invalid max_norm"},
                             {commit_.Of(1), "Invalid max_norm"}};
  cases[2].spec.grad_scale = 0;
  cases[3].spec.grad_scale = kInf;
  cases[4].spec.max_norm = -1;
  cases[5].spec.max_norm = std::nan("");
  harness_.PushAll(1);
  for (const Case& bad : cases) {
    const uint64_t request = harness_.Commit(0, bad.spec);
    ASSERT_NE(harness_.AnswerTo(0, request), nullptr);
    const absl::Status& status = harness_.AnswerTo(0, request)->status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(bad.text));
  }
  EXPECT_TRUE(harness_.CommitAll(commit_.Of(1)).outcome.applied);
  EXPECT_EQ(harness_.StepCounts()[0], 1);
}

TEST_F(JobStepsTest, NonFiniteGradientsSkipTheStepForAll) {
  const std::string before = harness_.StateBytes();
  uint64_t step = 0;
  for (const float bad : {kInf, -kInf, std::nanf("")}) {
    std::vector<float> gradient(5000, 0.5f);
    gradient[4999] = bad;
    harness_.SetGradient(kC, gradient);
    harness_.PushAll(++step);
    const auto answer = harness_.CommitAll(commit_.Of(step));
    ASSERT_TRUE(answer.status.ok());
    EXPECT_FALSE(answer.outcome.applied);
    EXPECT_TRUE(answer.outcome.found_inf);
    EXPECT_EQ(harness_.StateBytes(), before);
    EXPECT_EQ(harness_.job().Describe().committed_step(), step);
    EXPECT_EQ(harness_.job().Describe().skipped_steps(), step);
  }
}

TEST_F(JobStepsTest, OverflowByTheScaleSkipsTheStep) {
  harness_.SetGradient(0, std::vector<float>(100, 1e30f));
  CommitSpec spec = commit_.Of(1);
  spec.grad_scale = 1e-300;
  harness_.PushAll(1);
  EXPECT_TRUE(harness_.CommitAll(spec).outcome.found_inf);
  EXPECT_EQ(harness_.StepCounts()[0], 0);
}

TEST_F(JobStepsTest, ARankThatFoundInfSkipsTheStepForAll) {
  const std::string before = harness_.StateBytes();
  CommitSpec found = commit_.Of(1);
  found.found_inf = true;
  harness_.PushAll(1);
  const uint64_t a = harness_.Commit(0, commit_.Of(1));
  const uint64_t b = harness_.Commit(1, found);
  EXPECT_TRUE(harness_.AnswerTo(0, a)->outcome.found_inf);
  EXPECT_FALSE(harness_.AnswerTo(1, b)->outcome.applied);
  EXPECT_EQ(harness_.StateBytes(), before);
}

TEST_F(JobStepsTest, ACommittedStepIsAnsweredFromTheRecord) {
  CommitSpec spec = commit_.Of(1);
  spec.max_norm = 0.5;
  harness_.PushAll(1);
  const StepOutcome outcome = harness_.CommitAll(spec).outcome;
  const std::string after = harness_.StateBytes();
  for (int restart = 0; restart < 2; ++restart) {
    const auto* again = harness_.AnswerTo(1, harness_.Commit(1, spec));
    ASSERT_NE(again, nullptr);
    EXPECT_TRUE(again->status.ok());
    EXPECT_EQ(again->outcome.step, 1);
    EXPECT_EQ(again->outcome.applied, outcome.applied);
    EXPECT_EQ(again->outcome.gradient_norm, outcome.gradient_norm);
    EXPECT_EQ(again->outcome.clip_coefficient, outcome.clip_coefficient);
    CommitSpec other = spec;
    other.max_norm = 0.25;
    const auto* refused = harness_.AnswerTo(1, harness_.Commit(1, other));
    ASSERT_NE(refused, nullptr);
    EXPECT_EQ(refused->status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(refused->status.message(), HasSubstr("committed already"));
    EXPECT_EQ(harness_.StateBytes(), after);
    // A restart of the engine changes none of this.
    harness_.Close();
    ASSERT_TRUE(harness_.Open().ok());
    harness_.AttachAll();
  }
}

TEST_F(JobStepsTest, AttachTellsTheLastOutcome) {
  harness_.PushAll(1);
  const StepOutcome outcome = harness_.CommitAll(commit_.Of(1)).outcome;
  harness_.Detach(1);
  ASSERT_TRUE(harness_.Register(1).ok());
  const auto attached = harness_.Attach(1);
  ASSERT_TRUE(attached.ok());
  EXPECT_EQ(attached->committed_step, 1);
  EXPECT_EQ(attached->phase, v1::JOB_PHASE_READY);
  EXPECT_TRUE(attached->has_last_outcome);
  EXPECT_EQ(attached->last_outcome.gradient_norm, outcome.gradient_norm);
}

TEST_F(JobStepsTest, AbortDropsTheRanksPartAndAnswersItsCommit) {
  const std::string before = harness_.StateBytes();
  harness_.PushAll(1);
  const uint64_t request = harness_.Commit(0, commit_.Of(1));
  EXPECT_EQ(harness_.job().Abort(0, 2).code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(harness_.job().Abort(0, 1).ok());
  ASSERT_NE(harness_.AnswerTo(0, request), nullptr);
  EXPECT_EQ(harness_.AnswerTo(0, request)->status.code(),
            absl::StatusCode::kAborted);
  ASSERT_TRUE(harness_.job().Abort(1, 1).ok());
  EXPECT_EQ(harness_.job().Describe().open_step(), "");
  EXPECT_EQ(harness_.StateBytes(), before);
  harness_.PushAll(1);
  EXPECT_TRUE(harness_.CommitAll(commit_.Of(1)).outcome.applied);
}

TEST_F(JobStepsTest, ADyingRankDropsItsPartAndTheOthersWait) {
  JobHarness undisturbed(TwoRanks());
  undisturbed.Start(undisturbed.RandomTensors(1));
  undisturbed.Step(1, undisturbed.RandomTensors(2), commit_.Of(1));

  harness_.PushAll(1);
  const uint64_t first = harness_.Commit(0, commit_.Of(1));
  harness_.Detach(1);
  EXPECT_EQ(harness_.AnswerTo(0, first), nullptr);
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.SetGradients(harness_.RandomTensors(2));
  ASSERT_TRUE(harness_.Push(1, 1, 0, count()).ok());
  harness_.Commit(1, commit_.Of(1));
  ASSERT_NE(harness_.AnswerTo(0, first), nullptr);
  EXPECT_TRUE(harness_.AnswerTo(0, first)->outcome.applied);
  EXPECT_EQ(harness_.StateBytes(), undisturbed.StateBytes());
}

TEST_F(JobStepsTest, ARepeatedPushTakesWhatIsThereNow) {
  JobHarness once(TwoRanks());
  once.Start(once.RandomTensors(1));
  const StepOutcome expected =
      once.Step(1, once.RandomTensors(3), commit_.Of(1));

  harness_.PushAll(1);
  harness_.SetGradients(harness_.RandomTensors(3));
  harness_.PushAll(1);
  const StepOutcome outcome = harness_.CommitAll(commit_.Of(1)).outcome;
  EXPECT_EQ(outcome.gradient_norm, expected.gradient_norm);
  EXPECT_EQ(harness_.StateBytes(), once.StateBytes());
}

TEST_F(JobStepsTest, MicroStepsNeedAccumulate) {
  harness_.PushAll(1);
  const absl::Status status = harness_.Push(0, 1, 0, count(), 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("accumulate"));
}

TEST_F(JobStepsTest, DrainFinishesTheOpenStepAndOpensNoOther) {
  harness_.PushAll(1);
  EXPECT_TRUE(harness_.job().AwaitResumed(absl::InfinitePast()).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      harness_.job().AwaitDrained(absl::InfinitePast())));
  harness_.job().BeginDrain();
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      harness_.job().AwaitResumed(absl::InfinitePast())));
  const absl::Status busy = harness_.job().AwaitDrained(absl::InfinitePast());
  EXPECT_EQ(busy.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(busy.message(), HasSubstr("ranks 0, 1 have not committed"));
  EXPECT_TRUE(harness_.CommitAll(commit_.Of(1)).outcome.applied);
  EXPECT_TRUE(harness_.job().AwaitDrained(absl::InfinitePast()).ok());
  EXPECT_EQ(harness_.Push(0, 2, 0, 1).code(), absl::StatusCode::kUnavailable);
  const auto* refused = harness_.AnswerTo(0, harness_.Commit(0, commit_.Of(2)));
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->status.code(), absl::StatusCode::kUnavailable);
  // The recorded outcome is still returned.
  const auto* known = harness_.AnswerTo(0, harness_.Commit(0, commit_.Of(1)));
  ASSERT_NE(known, nullptr);
  EXPECT_TRUE(known->status.ok());
  harness_.Detach(0);
  EXPECT_EQ(harness_.Attach(0).status().code(), absl::StatusCode::kUnavailable);
  harness_.job().Resume();
  ASSERT_TRUE(harness_.Register(0).ok());
  ASSERT_TRUE(harness_.Attach(0).ok());
  EXPECT_TRUE(harness_.Push(0, 2, 0, 1).ok());
}

TEST_F(JobStepsTest, GradientNormsAreOfTheLastStepOfThisEngine) {
  const auto fetch = [&] {
    std::vector<double> norms(count());
    auto* bytes = reinterpret_cast<std::byte*>(norms.data());
    const auto step = harness_.job().Fetch(
        v1::STATE_ARRAY_GRADIENT_NORM, 0, 0, count(),
        absl::MakeSpan(bytes, norms.size() * sizeof(double)));
    if (!step.ok()) {
      EXPECT_EQ(step.status().code(), absl::StatusCode::kFailedPrecondition);
      norms.clear();
    }
    return norms;
  };
  EXPECT_TRUE(fetch().empty()) << "before the first step";
  const Tensors gradients = harness_.RandomTensors(7);
  harness_.SetGradients(gradients);
  harness_.PushAll(1, 0, {kNone});
  CommitSpec spec = commit_.Of(1);
  spec.grad_scale = 8;
  spec.max_norm = 1e-3;
  ASSERT_TRUE(harness_.CommitAll(spec).outcome.applied);
  harness_.SetGradients(harness_.RandomTensors(8));
  harness_.PushAll(2);  // overwrites nothing
  const std::vector<double> norms = fetch();
  ASSERT_EQ(norms.size(), count());
  for (uint32_t p = 0; p < count(); ++p) {
    double sum = 0;
    if (harness_.layout().parameters()[p].gradient_dtype != DType::kFloat32) {
      continue;  // rounded on their way
    }
    for (const double g : gradients[p]) sum += g / 8 * (g / 8);
    const double expected = p == kNone ? -1 : std::sqrt(sum);
    EXPECT_NEAR(norms[p], expected, 1e-12 * std::abs(expected)) << p;
  }
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  harness_.AttachAll();
  EXPECT_TRUE(fetch().empty()) << "of another engine";
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  const double norm = 1;
  EXPECT_EQ(
      harness_.job()
          .Load(0, v1::STATE_ARRAY_GRADIENT_NORM, 0, 0, 1, DType::kFloat32,
                {reinterpret_cast<const std::byte*>(&norm), sizeof(norm)})
          .code(),
      absl::StatusCode::kInvalidArgument);
}

TEST_F(JobStepsTest, StatsTellWhoStagedWhat) {
  harness_.PushAll(1, 0, {kNone});
  const v1::Job job = harness_.job().Describe();
  ASSERT_EQ(job.sessions_size(), 2);
  EXPECT_EQ(
      job.sessions(0).staged_parameters() + job.sessions(1).staged_parameters(),
      count() - 1);
  v1::ListParametersRequest request;
  request.set_page_size(3);
  auto page = harness_.job().ListParameters(request);
  ASSERT_TRUE(page.ok());
  ASSERT_EQ(page->parameters_size(), 3);
  EXPECT_TRUE(page->parameters(0).staged());
  EXPECT_FALSE(page->parameters(1).staged());
  request.set_page_token(page->next_page_token());
  page = harness_.job().ListParameters(request);
  ASSERT_TRUE(page.ok());
  ASSERT_EQ(page->parameters_size(), 2);
  EXPECT_EQ(page->parameters(1).parameter().name(), "one");
  EXPECT_EQ(page->next_page_token(), "");
  for (const char* token : {"x", " 1", "+1", "01", "1\n", "6"}) {
    request.set_page_token(token);
    EXPECT_EQ(harness_.job().ListParameters(request).status().code(),
              absl::StatusCode::kInvalidArgument)
        << token;
  }
}

// A client of gRPC takes 4 MiB unless it is told otherwise.
TEST_F(JobStepsTest, APageOfLongNamesIsShorter) {
  JobHarness::Setup setup;
  setup.layout.groups.resize(1);
  for (int i = 0; i < 10; ++i) {
    setup.layout.parameters.push_back(
        MakeParameter(absl::StrCat(i, std::string(size_t{1} << 20, 'n')), 1));
  }
  JobHarness harness(setup);
  harness.AttachAll();
  v1::ListParametersRequest request;
  int seen = 0;
  do {
    const auto page = harness.job().ListParameters(request);
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_LT(page->ByteSizeLong(), size_t{4} << 20);
    for (const v1::ParameterInfo& info : page->parameters()) {
      EXPECT_EQ(static_cast<int>(info.index()), seen++);
    }
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  EXPECT_EQ(seen, 10);
}

}  // namespace
}  // namespace optstate::session
