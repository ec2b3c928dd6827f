// Steps that are begun before they are decided give the same bits as without,
// for every decision, and at every crash of the engine.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/steps/foreseen_commit.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

// The steps that each test has taken before it begins.
constexpr uint64_t kBefore = ForeseenCommit::kSteps;

struct Case {
  const char* name;
  bool accumulate;
  MasterFormat master_format;
};

JobHarness::Setup TwoRanks(bool speculative, const Case& test) {
  JobHarness::Setup setup;
  setup.layout.master_format = test.master_format;
  setup.layout.groups = {{}, {.options = adam::kAmsgrad}};
  setup.layout.parameters = {
      MakeParameter("a", 20000),
      MakeParameter("b", 9000, 1, DType::kBFloat16, DType::kBFloat16),
      MakeParameter("idle", 5000, 1), MakeParameter("c", 7000, 1)};
  setup.world_size = 2;
  setup.accumulate = test.accumulate;
  setup.speculative = speculative;
  setup.client_instance = 90;
  return setup;
}

class JobSpeculationTest : public ::testing::TestWithParam<Case> {
 protected:
  JobSpeculationTest()
      : harness_(TwoRanks(true, GetParam())),
        plain_(TwoRanks(false, GetParam())) {
    harness_.Start(harness_.RandomTensors(1));
    plain_.Start(plain_.RandomTensors(1));
    Settle();
  }
  // Takes steps after which the next one is expected to be as these were.
  void Settle() {
    for (int i = 0; i < ForeseenCommit::kSteps; ++i) TakeBoth(CommitOf(Next()));
  }
  uint64_t Next() {
    return static_cast<uint64_t>(harness_.job().Describe().committed_step()) +
           1;
  }
  CommitSpec CommitOf(uint64_t step, double max_norm = 0) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    spec.grad_scale = 8;
    spec.max_norm = max_norm;
    return spec;
  }
  void Push(JobHarness* harness, uint64_t step) {
    harness->SetGradients(harness->RandomTensors(step));
    harness->PushAll(step, 0, {2});
  }
  void TakeBoth(const CommitSpec& spec) {
    for (JobHarness* harness : {&harness_, &plain_}) {
      Push(harness, spec.step);
      harness->CommitAll(spec);
    }
    ExpectEqual();
  }
  void ExpectEqual() {
    EXPECT_TRUE(harness_.StateBytes() == plain_.StateBytes());
  }
  // Returns whether the part that rank 0 owns has changed.
  bool Changed(const std::string& before) {
    std::string now;
    for (uint32_t p = 0; p < 4; ++p) {
      for (const float value : harness_.Parameter(p)) {
        now.append(reinterpret_cast<const char*>(&value), sizeof(value));
      }
    }
    return now != before;
  }
  std::string ParameterBytes() {
    std::string bytes;
    for (uint32_t p = 0; p < 4; ++p) {
      for (const float value : harness_.Parameter(p)) {
        bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
      }
    }
    return bytes;
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(2, AdamHyperparams());
  JobHarness harness_;
  JobHarness plain_;
};

TEST_P(JobSpeculationTest, ItIsBegunWhenTheFirstRankHasCommitted) {
  Push(&harness_, kBefore + 1);
  const std::string before = ParameterBytes();
  harness_.Commit(0, CommitOf(kBefore + 1));
  EXPECT_TRUE(Changed(before));
  harness_.Commit(1, CommitOf(kBefore + 1));
  Push(&plain_, kBefore + 1);
  plain_.CommitAll(CommitOf(kBefore + 1));
  ExpectEqual();
}

TEST_P(JobSpeculationTest, WhateverTheDecision) {
  TakeBoth(CommitOf(kBefore + 1));
  TakeBoth(CommitOf(kBefore + 2, 0.1));  // clipped
  TakeBoth(CommitOf(kBefore + 3, 1e9));  // not clipped
  CommitSpec skipped = CommitOf(kBefore + 4);
  for (JobHarness* harness : {&harness_, &plain_}) {
    Push(harness, kBefore + 4);
    harness->Commit(0, skipped);
    CommitSpec found = skipped;
    found.found_inf = true;
    harness->Commit(1, found);
  }
  ExpectEqual();
  TakeBoth(CommitOf(kBefore + 5));
}

TEST_P(JobSpeculationTest, RolledBackWhenTheStepIsNotTaken) {
  TakeBoth(CommitOf(kBefore + 1));
  const std::string committed = harness_.StateBytes();
  // The commits are unequal.
  Push(&harness_, kBefore + 2);
  harness_.Commit(0, CommitOf(kBefore + 2));
  harness_.Commit(1, CommitOf(kBefore + 2, 3));
  EXPECT_TRUE(harness_.StateBytes() == committed);
  // An abort by the rank that waits, and by the other.
  for (const uint32_t aborter : {0, 1}) {
    Push(&harness_, kBefore + 2);
    harness_.Commit(0, CommitOf(kBefore + 2));
    ASSERT_TRUE(harness_.job().Abort(aborter, kBefore + 2).ok());
    ASSERT_TRUE(harness_.job().Abort(1 - aborter, kBefore + 2).ok());
    EXPECT_TRUE(harness_.StateBytes() == committed);
  }
  // The other rank leaves, and its successor pushes something else.
  Push(&harness_, kBefore + 2);
  harness_.Commit(0, CommitOf(kBefore + 2));
  harness_.Detach(1);
  EXPECT_TRUE(harness_.StateBytes() == committed);
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  ASSERT_TRUE(harness_.job().Abort(0, kBefore + 2).ok());
  TakeBoth(CommitOf(kBefore + 2));
}

TEST_P(JobSpeculationTest, NothingIsSeenOfItBeforeTheDecision) {
  TakeBoth(CommitOf(kBefore + 1));
  const std::string committed = harness_.StateBytes();
  Push(&harness_, kBefore + 2);
  harness_.Commit(0, CommitOf(kBefore + 2));
  EXPECT_TRUE(harness_.StateBytes() == committed);  // by Fetch
  harness_.Commit(1, CommitOf(kBefore + 2));
  Push(&plain_, kBefore + 2);
  plain_.CommitAll(CommitOf(kBefore + 2));
  ExpectEqual();
}

// Kills the process at the n-th run.
class Killer final : public scheduler::StepObserver {
 public:
  explicit Killer(int run) : run_(run) {}
  void KillAt(int run) { run_ = run; }
  void OnRunUpdated(uint64_t /*step*/, uint64_t /*run*/) override {
    if (--run_ == 0) ::kill(::getpid(), SIGKILL);
  }

 private:
  std::atomic<int> run_;
};

// The engine dies during speculation, between that and the decision, and during
// the remaining update.
TEST_P(JobSpeculationTest, TheEngineDiesInIt) {
  TakeBoth(CommitOf(kBefore + 1));
  // Sums still exist; without them the step is taken with other gradients, so
  // that any remainder of the former ones shows.
  const uint64_t seed = GetParam().accumulate ? kBefore + 2 : 7;
  plain_.SetGradients(plain_.RandomTensors(seed));
  plain_.PushAll(kBefore + 2, 0, {2});
  plain_.CommitAll(CommitOf(kBefore + 2));
  const std::string expected = plain_.StateBytes();
  // This process has no threads when it forks.
  plain_.Close();
  for (int run = 1; run <= 6; ++run) {
    harness_.Close();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Killer killer(run);
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      Push(&harness_, kBefore + 2);
      harness_.Commit(0, CommitOf(kBefore + 2));
      ::kill(::getpid(), SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
  }
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(harness_.job().Describe().committed_step(), kBefore + 1);
  harness_.AttachAll();
  harness_.SetGradients(harness_.RandomTensors(seed));
  harness_.PushAll(kBefore + 2, 0, {2});
  harness_.CommitAll(CommitOf(kBefore + 2));
  EXPECT_TRUE(harness_.StateBytes() == expected);
}

JobHarness::Setup OneParameter(OptimizerKind optimizer, bool speculative) {
  JobHarness::Setup setup;
  setup.layout.optimizer = optimizer;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 20000)};
  setup.speculative = speculative;
  return setup;
}

TEST(JobSpeculationOptionTest, ItTakesMemoryAndIsRefusedWhereItCannotBe) {
  JobHarness with(OneParameter(OptimizerKind::kAdamW, true));
  JobHarness without(OneParameter(OptimizerKind::kAdamW, false));
  ASSERT_TRUE(with.Register(0).ok());
  ASSERT_TRUE(without.Register(0).ok());
  EXPECT_GT(with.job().Describe().state_bytes(),
            without.job().Describe().state_bytes());
  JobHarness whole(OneParameter(OptimizerKind::kLamb, true));
  const absl::Status refused = whole.Register(0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("lamb"));
}

// A rank that says otherwise is refused while another one is attached; else the
// job is made so.
TEST(JobSpeculationOptionTest, ItSurvivesTheEngineAndCanBeChanged) {
  JobHarness harness(OneParameter(OptimizerKind::kAdamW, true));
  harness.Start(harness.RandomTensors(1));
  harness.Close();
  ASSERT_TRUE(harness.Open().ok());
  harness.AttachAll();
  EXPECT_FALSE(harness.job().OpenRunStamps()->ok());
  harness.setup().speculative = false;
  const absl::Status differs = harness.Register(0).status();
  EXPECT_EQ(differs.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(differs.message(), ::testing::HasSubstr("speculative"));
  harness.Detach(0);
  ASSERT_TRUE(harness.Register(0).ok());
  EXPECT_TRUE(harness.job().OpenRunStamps()->ok());
}

// Steps that are begun as gradients are pushed.
class JobWorkAheadTest : public JobSpeculationTest {
 protected:
  // Works until there is nothing more to do; returns whether there was.
  bool WorkAhead() {
    const std::string before = ParameterBytes();
    while (harness_.job().WorkAhead(0)) {
    }
    return ParameterBytes() != before;
  }
  void PushOf(uint32_t rank) {
    ASSERT_TRUE(harness_.Push(rank, kBefore + 1, 0, 2).ok());
    ASSERT_TRUE(harness_.Push(rank, kBefore + 1, 3, 1).ok());
  }
  // Takes the step that has been begun, and compares.
  void Finish(const CommitSpec& spec) {
    Push(&plain_, spec.step);
    harness_.CommitAll(spec);
    plain_.CommitAll(spec);
    ExpectEqual();
  }
};

TEST_P(JobWorkAheadTest, ABegunStepGivesTheSameBits) {
  Push(&harness_, kBefore + 1);
  EXPECT_TRUE(WorkAhead());
  EXPECT_FALSE(WorkAhead());  // once
  Finish(CommitOf(kBefore + 1));
  // The step was begun wholly: the commit has nothing to update.
  Push(&harness_, kBefore + 2);
  EXPECT_TRUE(WorkAhead());
  const std::string begun = ParameterBytes();
  Finish(CommitOf(kBefore + 2));
  EXPECT_EQ(ParameterBytes(), begun);
}

TEST_P(JobWorkAheadTest, WhateverTheCommitSays) {
  const auto begin = [this] {
    Push(&harness_, Next());
    return WorkAhead();
  };
  EXPECT_TRUE(begin());
  std::vector<Hyperparams> groups = groups_;
  groups[1].value[0] *= 0.5;
  CommitSpec changed = CommitOf(Next());
  changed.groups = groups;
  Finish(changed);
  // Now that rates change, the next step is not begun.
  EXPECT_FALSE(begin());
  Finish(CommitOf(Next()));
  Settle();
  EXPECT_TRUE(begin());
  Finish(CommitOf(Next(), 0.1));  // clipped
  Settle();
  EXPECT_TRUE(begin());
  CommitSpec skipped = CommitOf(Next());
  skipped.found_inf = true;
  Finish(skipped);
}

TEST_P(JobWorkAheadTest, AGradientThatIsPushedAgainCounts) {
  harness_.SetGradients(harness_.RandomTensors(77));
  harness_.PushAll(kBefore + 1, 0, {2});
  EXPECT_TRUE(WorkAhead());
  Push(&harness_, kBefore + 1);
  Finish(CommitOf(kBefore + 1));
}

TEST_P(JobWorkAheadTest, NotBeforeAllRanksAreInTheStep) {
  harness_.SetGradients(harness_.RandomTensors(kBefore + 1));
  PushOf(0);
  EXPECT_FALSE(WorkAhead());
  PushOf(1);
  EXPECT_TRUE(WorkAhead());
  Finish(CommitOf(kBefore + 1));
}

TEST_P(JobWorkAheadTest, RolledBackByWhatEndsTheStep) {
  const std::string committed = harness_.StateBytes();
  for (const bool aborts : {true, false}) {
    Push(&harness_, kBefore + 1);
    EXPECT_TRUE(WorkAhead());
    if (aborts) {
      ASSERT_TRUE(harness_.job().Abort(0, kBefore + 1).ok());
      ASSERT_TRUE(harness_.job().Abort(1, kBefore + 1).ok());
    } else {
      ASSERT_TRUE(harness_.job().BeginLoad(1).ok());
      EXPECT_FALSE(WorkAhead());  // while a rank loads
      ASSERT_TRUE(harness_.job().Abort(1, kBefore + 1).ok());
      ASSERT_TRUE(harness_.job().Abort(0, kBefore + 1).ok());
    }
    EXPECT_TRUE(harness_.StateBytes() == committed);
  }
  TakeBoth(CommitOf(kBefore + 1));
}

// Each engine takes steps, and dies in the one that it begins early then.
TEST_P(JobWorkAheadTest, TheEngineDiesInIt) {
  constexpr int kEngines = 6;
  plain_.Close();  // no threads in this process when it forks
  uint64_t step = kBefore;
  for (int run = 1; run <= kEngines; ++run, step += kBefore) {
    harness_.Close();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Killer killer(std::numeric_limits<int>::max());
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      for (uint64_t i = 1; i <= kBefore; ++i) {
        Push(&harness_, step + i);
        harness_.CommitAll(CommitOf(step + i));
      }
      Push(&harness_, step + kBefore + 1);
      killer.KillAt(run);
      WorkAhead();
      ::_exit(2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
  }
  ASSERT_TRUE(harness_.Open().ok());
  ASSERT_TRUE(plain_.Open().ok());
  EXPECT_EQ(harness_.job().Describe().committed_step(), step);
  plain_.AttachAll();
  for (uint64_t taken = kBefore + 1; taken <= step; ++taken) {
    Push(&plain_, taken);
    plain_.CommitAll(CommitOf(taken));
  }
  ExpectEqual();
}

// Between two parts of it the rank's next call is served.
TEST(JobWorkAheadBatchTest, LargeParametersAreUpdatedOneByOne) {
  JobHarness::Setup setup = OneParameter(OptimizerKind::kSgd, true);
  setup.layout.parameters = {MakeParameter("a", 1 << 20),
                             MakeParameter("b", 1 << 20)};
  JobHarness harness(setup);
  const Tensors values = harness.RandomTensors(1);
  harness.Start(values);
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  CommitSpec spec;
  spec.groups = groups;
  for (spec.step = 1; spec.step <= kBefore; ++spec.step) {
    harness.Step(spec.step, values, spec);
  }
  harness.SetGradients(values);
  harness.PushAll(spec.step);
  const std::vector<float> a = harness.Parameter(0);
  const std::vector<float> b = harness.Parameter(1);
  EXPECT_TRUE(harness.job().WorkAhead(0));
  EXPECT_NE(harness.Parameter(0), a);
  EXPECT_EQ(harness.Parameter(1), b);
  EXPECT_FALSE(harness.job().WorkAhead(0));
  EXPECT_NE(harness.Parameter(1), b);
}

// A begin's cost grows with the number of parameters, so small ones are begun
// together.
TEST(JobWorkAheadBatchTest, SmallParametersAreUpdatedTogether) {
  constexpr uint32_t kParameters = 64;
  JobHarness::Setup setup = OneParameter(OptimizerKind::kSgd, true);
  setup.layout.parameters.clear();
  for (uint32_t p = 0; p < kParameters; ++p) {
    setup.layout.parameters.push_back(
        MakeParameter("p" + std::to_string(p), 100));
  }
  JobHarness harness(setup);
  const Tensors values = harness.RandomTensors(1);
  harness.Start(values);
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  CommitSpec spec;
  spec.groups = groups;
  for (spec.step = 1; spec.step <= kBefore; ++spec.step) {
    harness.Step(spec.step, values, spec);
  }
  harness.SetGradients(values);
  // Each of the 16 parts at most has four of the 64 parameters.
  for (uint32_t p = 0; p < kParameters; ++p) {
    const std::vector<float> first = harness.Parameter(p / 4 * 4);
    const std::vector<float> last = harness.Parameter(p);
    ASSERT_TRUE(harness.Push(0, spec.step, p, 1).ok());
    EXPECT_FALSE(harness.job().WorkAhead(0));
    EXPECT_EQ(harness.Parameter(p / 4 * 4) != first, p % 4 == 3) << p;
    EXPECT_EQ(harness.Parameter(p) != last, p % 4 == 3) << p;
  }
}

constexpr Case kCases[] = {
    {"Plain", false, MasterFormat::kFloat32},
    {"Accumulating", true, MasterFormat::kFloat32},
    {"SplitMaster", false, MasterFormat::kSplit},
};

INSTANTIATE_TEST_SUITE_P(All, JobWorkAheadTest,
                         ::testing::Values(kCases[0], kCases[2]),
                         [](const auto& param_info) {
                           return param_info.param.name;
                         });

INSTANTIATE_TEST_SUITE_P(All, JobSpeculationTest, ::testing::ValuesIn(kCases),
                         [](const auto& param_info) {
                           return param_info.param.name;
                         });

}  // namespace
}  // namespace optstate::session
