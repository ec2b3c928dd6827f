// A load that all ranks had finished outlives a power cut, also when the engine
// died before it had made the load durable: the ranks are told that it is done.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_crash_fixture.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;

enum class LoadInstant { kSealed, kRecorded };

// Kills the process when a load comes to an instant.
class LoadKiller final : public scheduler::StepObserver {
 public:
  explicit LoadKiller(LoadInstant instant) : instant_(instant) {}
  void OnLoadSealed() override { At(LoadInstant::kSealed); }
  void OnLoadRecorded() override { At(LoadInstant::kRecorded); }

 private:
  void At(LoadInstant instant) const {
    if (instant == instant_) ::kill(::getpid(), SIGKILL);
  }

  const LoadInstant instant_;
};

JobHarness::Setup Durable(v1::DurabilityKind durability) {
  JobHarness::Setup setup = TwoRanks();
  setup.storage.set_durability(durability);
  if (durability == v1::DURABILITY_KIND_EVERY) {
    setup.storage.set_every_steps(1000);
  }
  return setup;
}

class JobLoadDurableTest
    : public JobCrashTest,
      public ::testing::WithParamInterface<v1::DurabilityKind> {
 protected:
  JobLoadDurableTest() : JobCrashTest(Durable(GetParam())) {}

  // Returns the state behind a load in which nothing dies. The job is closed:
  // no thread of it is left in this process when another one forks.
  std::string StateBehindLoad(bool has_taken_steps) {
    JobHarness undisturbed(Durable(GetParam()));
    if (has_taken_steps) {
      StartAt2(&undisturbed);
    } else {
      undisturbed.AttachAll();
    }
    Load(&undisturbed);
    return undisturbed.StateBytes();
  }
  static void Load(JobHarness* harness) {
    harness->LoadMasters(harness->RandomTensors(99));
    EXPECT_TRUE(harness->FinishAll().status.ok());
  }
  void DieInLoad(LoadInstant instant) {
    DieIn([&] {
      LoadKiller killer(instant);
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      Load(&harness_);
    });
  }
  // The next engine adopts the load. With durability "step" it has made it
  // durable before it takes a call, and may be killed at once; else it has at
  // its orderly end.
  void AdoptAndLosePower() {
    if (GetParam() == v1::DURABILITY_KIND_STEP) {
      ASSERT_NO_FATAL_FAILURE(DieIn([&] {
        if (!harness_.Open().ok()) ::_exit(1);
        ::kill(::getpid(), SIGKILL);
      }));
    } else {
      ASSERT_TRUE(harness_.Open().ok());
      harness_.Close();
    }
    harness_.DropMemory();
    ASSERT_TRUE(harness_.Open().ok());
    EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  }
  // Returns the number of loads that a returning client gets.
  uint32_t LoadsFinished() {
    EXPECT_TRUE(harness_.Register(0).ok());
    const auto attached = harness_.Attach(0);
    EXPECT_TRUE(attached.ok()) << attached.status();
    return attached.ok() ? attached->loads_finished : 0;
  }
};

TEST_P(JobLoadDurableTest, OfAJobThatHasTakenSteps) {
  const std::string expected = StateBehindLoad(/*has_taken_steps=*/true);
  for (const LoadInstant instant :
       {LoadInstant::kSealed, LoadInstant::kRecorded}) {
    ASSERT_NO_FATAL_FAILURE(DieInLoad(instant));
    ASSERT_NO_FATAL_FAILURE(AdoptAndLosePower());
    EXPECT_EQ(committed_step(), 2);
    EXPECT_TRUE(harness_.StateBytes() == expected);
    EXPECT_EQ(LoadsFinished(), instant == LoadInstant::kSealed ? 2u : 3u);
    harness_.DetachAll();
  }
}

// No step of this job is durable, which is not the same as step 0.
TEST_P(JobLoadDurableTest, TheFirstOfANewJob) {
  harness_.Close();
  harness_.DropMemory();
  for (const auto& entry : fs::directory_iterator(harness_.disk())) {
    fs::remove_all(entry.path());
  }
  const std::string expected = StateBehindLoad(/*has_taken_steps=*/false);
  ASSERT_NO_FATAL_FAILURE(DieInLoad(LoadInstant::kRecorded));
  ASSERT_NO_FATAL_FAILURE(AdoptAndLosePower());
  EXPECT_EQ(committed_step(), 0);
  EXPECT_TRUE(harness_.StateBytes() == expected);
  EXPECT_EQ(LoadsFinished(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, JobLoadDurableTest,
                         ::testing::Values(v1::DURABILITY_KIND_STEP,
                                           v1::DURABILITY_KIND_EVERY));

}  // namespace
}  // namespace optstate::session
