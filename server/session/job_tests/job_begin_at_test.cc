// A job that takes over the state of another one begins at its step, with the
// end of a load: whole or not at all, whatever instant its engine dies at.

#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_crash_fixture.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;

// Later than any job gets by steps in a test.
constexpr uint64_t kStep = uint64_t{1} << 40;
constexpr uint32_t kLoads = 7;

LoadEnd AtStep(uint64_t step) { return {.begin_at = BeginAt{step, kLoads}}; }

enum class Content { kAll, kNone };  // of the load that the job begins with
enum class At { kBegun, kLoaded, kFinishedByOne, kRecorded };

void Die() { ::kill(::getpid(), SIGKILL); }

class DiesWhenRecorded final : public scheduler::StepObserver {
 public:
  void OnLoadRecorded() override { Die(); }
};

JobHarness::Setup Swapped() {
  JobHarness::Setup setup = TwoRanks();
  setup.storage.set_placement(v1::PLACEMENT_NVME);
  return setup;
}

JobHarness::Setup Durable() {
  JobHarness::Setup setup = TwoRanks();
  setup.storage.set_durability(v1::DURABILITY_KIND_STEP);
  return setup;
}

JobHarness::Setup InFormat(StateFormat format) {
  JobHarness::Setup setup = TwoRanks();
  setup.layout.state_format = format;
  return setup;
}

// A job that has nothing yet, and calls that load it.
class BeginAtTest : public JobCrashTest {
 protected:
  explicit BeginAtTest(const JobHarness::Setup& setup = TwoRanks())
      : JobCrashTest(setup) {
    harness_.Close();
    harness_.DropMemory();
    for (const auto& entry : fs::directory_iterator(harness_.disk())) {
      fs::remove_all(entry.path());
    }
  }

  static void LoadContent(JobHarness* harness) {
    harness->LoadMasters(harness->RandomTensors(99));
  }
  static void BeginAll(JobHarness* harness) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(harness->job().BeginLoad(rank).ok());
    }
  }
  // Has a job begin at a step: by a load of all, or by one more of nothing.
  static void Begin(JobHarness* harness, uint64_t step, Content content) {
    harness->AttachAll();
    LoadContent(harness);
    if (content == Content::kNone) {
      EXPECT_TRUE(harness->FinishAll().status.ok());
      BeginAll(harness);
    }
    const auto answer = harness->FinishAll(AtStep(step));
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.outcome.step, step);
  }
  std::string StateAfterBegin() {
    JobHarness undisturbed(harness_.setup());
    Begin(&undisturbed, kStep, Content::kAll);
    undisturbed.Step(kStep + 1, undisturbed.RandomTensors(5),
                     CommitOf(kStep + 1));
    return undisturbed.StateBytes();
  }
  void DieAt(At instant, Content content) {
    if (content == Content::kNone) {
      ASSERT_TRUE(harness_.Open().ok());
      harness_.AttachAll();
      LoadContent(&harness_);
      ASSERT_TRUE(harness_.FinishAll().status.ok());
    }
    DieIn([&] {
      DiesWhenRecorded killer;
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      BeginAll(&harness_);
      if (instant == At::kBegun) Die();
      if (content == Content::kAll) LoadContent(&harness_);
      if (instant == At::kLoaded) Die();
      harness_.job().FinishLoad(0, 1000, AtStep(kStep));
      if (instant == At::kFinishedByOne) Die();
      harness_.job().FinishLoad(1, 1001, AtStep(kStep));
    });
  }
  // Returns the number of loads that a returning client gets.
  uint32_t LoadsFinished() {
    harness_.DetachAll();
    EXPECT_TRUE(harness_.Register(0).ok());
    const auto attached = harness_.Attach(0);
    EXPECT_TRUE(attached.ok()) << attached.status();
    harness_.DetachAll();
    return attached.ok() ? attached->loads_finished : 0;
  }
  void ExpectBegun() {
    EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
    EXPECT_EQ(committed_step(), kStep);
    EXPECT_EQ(LoadsFinished(), kLoads);
  }
  void ExpectGoesOn(const std::string& expected) {
    harness_.AttachAll();
    harness_.Step(kStep + 1, harness_.RandomTensors(5), CommitOf(kStep + 1));
    EXPECT_TRUE(harness_.StateBytes() == expected);
  }
};

class DiesAsItBegins
    : public BeginAtTest,
      public ::testing::WithParamInterface<std::tuple<At, Content>> {
 protected:
  using BeginAtTest::BeginAtTest;
  void Check() {
    const auto [instant, content] = GetParam();
    const std::string expected = StateAfterBegin();
    ASSERT_NO_FATAL_FAILURE(DieAt(instant, content));
    ASSERT_TRUE(harness_.Open().ok());
    if (instant == At::kRecorded) {
      ExpectBegun();
    } else {
      EXPECT_EQ(committed_step(), 0);
      const bool has_state = content == Content::kNone;
      EXPECT_EQ(phase(),
                has_state ? v1::JOB_PHASE_READY : v1::JOB_PHASE_LOADING);
      EXPECT_EQ(LoadsFinished(), has_state ? 1u : 0u);
      // The load is taken once more.
      harness_.AttachAll();
      if (content == Content::kAll) {
        LoadContent(&harness_);
      } else {
        BeginAll(&harness_);
      }
      ASSERT_TRUE(harness_.FinishAll(AtStep(kStep)).status.ok());
      harness_.DetachAll();
    }
    ExpectGoesOn(expected);
  }
};

TEST_P(DiesAsItBegins, TheJobIsAtTheStepOrAtNone) { Check(); }

auto Deaths() {
  return ::testing::Combine(
      ::testing::Values(At::kBegun, At::kLoaded, At::kFinishedByOne,
                        At::kRecorded),
      ::testing::Values(Content::kAll, Content::kNone));
}
INSTANTIATE_TEST_SUITE_P(All, DiesAsItBegins, Deaths());

class DiesAsItBeginsOnDisk : public DiesAsItBegins {
 protected:
  DiesAsItBeginsOnDisk() : DiesAsItBegins(Swapped()) {}
};
TEST_P(DiesAsItBeginsOnDisk, TheJobIsAtTheStepOrAtNone) { Check(); }
INSTANTIATE_TEST_SUITE_P(All, DiesAsItBeginsOnDisk, Deaths());

// The step is durable as one is that the job has taken, also when the engine
// died before it had made it so.
class BeginAtDurableTest : public BeginAtTest {
 protected:
  BeginAtDurableTest() : BeginAtTest(Durable()) {}
  void ExpectDurable(const std::string& expected) {
    harness_.Close();
    harness_.DropMemory();
    ASSERT_TRUE(harness_.Open().ok());
    ExpectBegun();
    EXPECT_EQ(harness_.job().Describe().disk().durable_step(), kStep);
    ExpectGoesOn(expected);
  }
};

TEST_F(BeginAtDurableTest, APowerCutLeavesTheStep) {
  const std::string expected = StateAfterBegin();
  ASSERT_TRUE(harness_.Open().ok());
  Begin(&harness_, kStep, Content::kNone);
  EXPECT_EQ(harness_.job().Describe().disk().durable_step(), kStep);
  harness_.DetachAll();
  ASSERT_NO_FATAL_FAILURE(ExpectDurable(expected));
}

TEST_F(BeginAtDurableTest, TheNextEngineMakesItDurable) {
  const std::string expected = StateAfterBegin();
  ASSERT_NO_FATAL_FAILURE(DieAt(At::kRecorded, Content::kAll));
  ASSERT_NO_FATAL_FAILURE(DieIn([&] {
    if (!harness_.Open().ok()) ::_exit(1);
    Die();
  }));
  ASSERT_NO_FATAL_FAILURE(ExpectDurable(expected));
}

// The other way to a step is to skip as many.
class BeginAtBitsTest : public BeginAtTest,
                        public ::testing::WithParamInterface<StateFormat> {
 protected:
  BeginAtBitsTest() : BeginAtTest(InFormat(GetParam())) {}
};

TEST_P(BeginAtBitsTest, AreThoseAfterAsManySkippedSteps) {
  constexpr uint64_t kFew = 5;
  JobHarness stepped(harness_.setup());
  stepped.Start(stepped.RandomTensors(99));
  for (uint64_t step = 1; step <= kFew; ++step) {
    CommitSpec nothing = CommitOf(step);
    nothing.found_inf = true;
    EXPECT_TRUE(stepped.CommitAll(nothing).status.ok());
  }
  JobHarness begun(harness_.setup());
  Begin(&begun, kFew, Content::kAll);
  for (uint64_t step = kFew + 1; step <= kFew + 2; ++step) {
    for (JobHarness* harness : {&stepped, &begun}) {
      harness->Step(step, harness->RandomTensors(step), CommitOf(step));
    }
  }
  EXPECT_TRUE(begun.StateBytes() == stepped.StateBytes());
  EXPECT_EQ(begun.StepCounts(), stepped.StepCounts());
  EXPECT_EQ(begun.job().Describe().committed_step(), kFew + 2);
}

INSTANTIATE_TEST_SUITE_P(Formats, BeginAtBitsTest,
                         ::testing::Values(StateFormat::kFloat32,
                                           StateFormat::kBFloat16,
                                           StateFormat::kDynamic8));

TEST_F(BeginAtTest, TheLossScalerIsWhereItWasRegistered) {
  ASSERT_TRUE(harness_.Open().ok());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    RegisterSpec spec = harness_.SpecOf(rank);
    v1::LossScaler& scaler = spec.loss_scaler.emplace();
    scaler.set_dynamic(true);
    scaler.set_init_scale(1024);
    scaler.set_growth_factor(2);
    scaler.set_backoff_factor(0.5);
    scaler.set_growth_interval(10);
    scaler.set_hysteresis(3);
    v1::LossScalerState& state = spec.loss_scaler_state.emplace();
    state.set_loss_scale(64);
    state.set_good_steps(9);
    state.set_hysteresis_left(2);
    ASSERT_TRUE(harness_.job().Register(spec).ok());
    ASSERT_TRUE(harness_.Attach(rank).ok());
  }
  LoadContent(&harness_);
  const auto answer = harness_.FinishAll(AtStep(kStep));
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.outcome.loss_scale, 64);
  EXPECT_EQ(answer.outcome.good_steps, 9u);
  EXPECT_EQ(answer.outcome.hysteresis_left, 2u);
  // The tenth good step has the scale grow.
  const StepOutcome next = harness_.Step(
      kStep + 1, harness_.RandomTensors(5, /*scale=*/1), CommitOf(kStep + 1));
  EXPECT_EQ(next.loss_scale, 128);
}

TEST_F(BeginAtTest, TheStepIsDescribedAsOneThatUpdatedNothing) {
  ASSERT_TRUE(harness_.Open().ok());
  Begin(&harness_, kStep, Content::kAll);
  const v1::Job job = harness_.job().Describe();
  EXPECT_EQ(job.committed_step(), kStep);
  EXPECT_TRUE(job.has_committed_at());
  EXPECT_TRUE(job.last_outcome().applied());
  EXPECT_EQ(job.last_outcome().gradient_norm(), 0);
  EXPECT_EQ(job.last_outcome().clip_coefficient(), 1);
  const auto position = harness_.job().Position();
  ASSERT_TRUE(position.ok()) << position.status();
  EXPECT_EQ(position->committed_step, kStep);
  EXPECT_EQ(position->loads_finished, kLoads);
  ASSERT_TRUE(position->last_outcome.has_value());
  EXPECT_EQ(position->last_outcome->digest, 0u) << "taken in one phase";
}

}  // namespace
}  // namespace optstate::session
