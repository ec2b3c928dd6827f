// Steps that are begun before they are decided give the same bits as without,
// for every decision, and at every crash of the engine.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/job_harness.h"

namespace optstate {
namespace {

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
  Push(&harness_, 1);
  const std::string before = ParameterBytes();
  harness_.Commit(0, CommitOf(1));
  EXPECT_TRUE(Changed(before));
  harness_.Commit(1, CommitOf(1));
  Push(&plain_, 1);
  plain_.CommitAll(CommitOf(1));
  ExpectEqual();
}

TEST_P(JobSpeculationTest, WhateverTheDecision) {
  TakeBoth(CommitOf(1));
  TakeBoth(CommitOf(2, 0.1));  // clipped
  TakeBoth(CommitOf(3, 1e9));  // not clipped
  CommitSpec skipped = CommitOf(4);
  for (JobHarness* harness : {&harness_, &plain_}) {
    Push(harness, 4);
    harness->Commit(0, skipped);
    CommitSpec found = skipped;
    found.found_inf = true;
    harness->Commit(1, found);
  }
  ExpectEqual();
  TakeBoth(CommitOf(5));
}

TEST_P(JobSpeculationTest, TakenBackWhenTheStepIsNotTaken) {
  TakeBoth(CommitOf(1));
  const std::string committed = harness_.StateBytes();
  // Unequal commits.
  Push(&harness_, 2);
  harness_.Commit(0, CommitOf(2));
  harness_.Commit(1, CommitOf(2, 3));
  EXPECT_TRUE(harness_.StateBytes() == committed);
  // An abort by the rank that waits, and by the other.
  for (const uint32_t aborter : {0, 1}) {
    Push(&harness_, 2);
    harness_.Commit(0, CommitOf(2));
    ASSERT_TRUE(harness_.job().Abort(aborter, 2).ok());
    ASSERT_TRUE(harness_.job().Abort(1 - aborter, 2).ok());
    EXPECT_TRUE(harness_.StateBytes() == committed);
  }
  // The other rank leaves, and its successor pushes something else.
  Push(&harness_, 2);
  harness_.Commit(0, CommitOf(2));
  harness_.Detach(1);
  EXPECT_TRUE(harness_.StateBytes() == committed);
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  ASSERT_TRUE(harness_.job().Abort(0, 2).ok());
  TakeBoth(CommitOf(2));
}

TEST_P(JobSpeculationTest, NothingIsSeenOfItBeforeTheDecision) {
  TakeBoth(CommitOf(1));
  const std::string committed = harness_.StateBytes();
  Push(&harness_, 2);
  harness_.Commit(0, CommitOf(2));
  EXPECT_TRUE(harness_.StateBytes() == committed);  // by Fetch
  harness_.Commit(1, CommitOf(2));
  Push(&plain_, 2);
  plain_.CommitAll(CommitOf(2));
  ExpectEqual();
}

// Kills the process at the n-th run.
class Killer final : public StepObserver {
 public:
  explicit Killer(int run) : run_(run) {}
  void OnRunUpdated(uint64_t /*step*/, uint64_t /*run*/) override {
    if (--run_ == 0) ::kill(::getpid(), SIGKILL);
  }

 private:
  std::atomic<int> run_;
};

// The engine dies during speculation, between that and the decision, and during
// the remaining update.
TEST_P(JobSpeculationTest, TheEngineDiesInIt) {
  TakeBoth(CommitOf(1));
  // Sums still exist; without them the step is taken with other gradients, so
  // that any remainder of the former ones shows.
  const uint64_t seed = GetParam().accumulate ? 2 : 7;
  plain_.SetGradients(plain_.RandomTensors(seed));
  plain_.PushAll(2, 0, {2});
  plain_.CommitAll(CommitOf(2));
  const std::string expected = plain_.StateBytes();
  // No threads in this process when it forks.
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
      Push(&harness_, 2);
      harness_.Commit(0, CommitOf(2));
      ::kill(::getpid(), SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
  }
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(harness_.job().Describe().committed_step(), 1);
  harness_.AttachAll();
  harness_.SetGradients(harness_.RandomTensors(seed));
  harness_.PushAll(2, 0, {2});
  harness_.CommitAll(CommitOf(2));
  EXPECT_TRUE(harness_.StateBytes() == expected);
}

uint64_t StateBytesOf(OptimizerKind optimizer, bool speculative) {
  JobHarness::Setup setup;
  setup.layout.optimizer = optimizer;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 20000)};
  setup.speculative = speculative;
  JobHarness harness(setup);
  EXPECT_TRUE(harness.Register(0).ok());
  return harness.job().Describe().state_bytes();
}

TEST(JobSpeculationRoomTest, NoneForAnOptimizerThatIsNeverSpeculatedWith) {
  EXPECT_GT(StateBytesOf(OptimizerKind::kAdamW, true),
            StateBytesOf(OptimizerKind::kAdamW, false));
  EXPECT_EQ(StateBytesOf(OptimizerKind::kLamb, true),
            StateBytesOf(OptimizerKind::kLamb, false));
}

constexpr Case kCases[] = {
    {"Plain", false, MasterFormat::kFloat32},
    {"Accumulating", true, MasterFormat::kFloat32},
    {"SplitMaster", false, MasterFormat::kSplit},
};

INSTANTIATE_TEST_SUITE_P(All, JobSpeculationTest, ::testing::ValuesIn(kCases),
                         [](const auto& param_info) {
                           return param_info.param.name;
                         });

}  // namespace
}  // namespace optstate
