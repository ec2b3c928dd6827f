#ifndef OPTSTATE_SERVER_SESSION_TESTING_JOB_CRASH_FIXTURE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_JOB_CRASH_FIXTURE_H_

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_harness.h"

// A fixture whose engine dies at a chosen instant, in a process of its own.

namespace optstate::session {

enum class Instant { kMarked, kFirstRun, kLaterRun, kRunsDone, kRecorded };

// Kills the process when step 3 comes to an instant.
class Killer final : public scheduler::StepObserver {
 public:
  explicit Killer(Instant instant) : instant_(instant) {}
  void OnStepMarked(uint64_t step) override { At(step, Instant::kMarked); }
  void OnRunUpdated(uint64_t step, uint64_t) override {
    if (step != 3) return;
    At(step, Instant::kFirstRun);
    if (++runs_ == 4) At(step, Instant::kLaterRun);
  }
  void OnRunsDone(uint64_t step) override { At(step, Instant::kRunsDone); }
  void OnStepRecorded(uint64_t step) override { At(step, Instant::kRecorded); }

 private:
  void At(uint64_t step, Instant instant) {
    if (step == 3 && instant == instant_) ::kill(::getpid(), SIGKILL);
  }

  const Instant instant_;
  std::atomic<int> runs_{0};
};

inline constexpr uint64_t kInstance = 70;

enum class Case { kPlain, kAccumulate, kRanksLackGradients };

inline JobHarness::Setup TwoRanks(Case of = Case::kPlain) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}, {.options = adam::kAmsgrad}};
  setup.layout.parameters = {
      MakeParameter("a", 20000),
      MakeParameter("b", 9000, 1, DType::kBFloat16, DType::kBFloat16),
      MakeParameter("idle", 5000, 1)};
  setup.world_size = 2;
  setup.accumulate = of == Case::kAccumulate;
  if (of == Case::kRanksLackGradients) {
    setup.partition = PartitionMode::kReplicated;
  }
  setup.client_instance = kInstance;
  return setup;
}

// Takes steps 1 and 2; then an engine dies in step 3, which clips and leaves a
// parameter out.
class JobCrashTest : public ::testing::Test {
 protected:
  explicit JobCrashTest(const JobHarness::Setup& setup = TwoRanks())
      : harness_(setup) {
    StartAt2(&harness_);
    committed_ = harness_.StateBytes();
    JobHarness undisturbed(setup);
    StartAt2(&undisturbed);
    TakeStep3(&undisturbed);
    expected_ = undisturbed.StateBytes();
  }

  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    if (step == 3) spec.max_norm = 1;
    return spec;
  }
  void StartAt2(JobHarness* harness) {
    harness->Start(harness->RandomTensors(1));
    for (uint64_t step = 1; step <= 2; ++step) {
      harness->Step(step, harness->RandomTensors(step), CommitOf(step));
    }
  }
  void PushStep3(JobHarness* harness) {
    if (harness->setup().partition == PartitionMode::kReplicated) {
      SetGradientsOfRanks(harness);
      for (uint32_t rank = 0; rank < 2; ++rank) {
        EXPECT_TRUE(harness->Push(rank, 3, rank, 1).ok());
      }
      return;
    }
    harness->SetGradients(harness->RandomTensors(3));
    harness->PushAll(3, 0, {2});
    if (!harness->setup().accumulate) return;
    harness->SetGradients(harness->RandomTensors(4));
    harness->PushAll(3, 1, {2});
  }
  void TakeStep3(JobHarness* harness) {
    PushStep3(harness);
    harness->CommitAll(CommitOf(3));
  }

  static void SetGradientsOfRanks(JobHarness* harness) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      harness->SetGradientsOf(rank, harness->RandomTensors(3 + rank));
    }
  }

  // Forks a process that opens the job, runs `what` and is killed by it. The
  // pool has one worker: a second one would go on while the first dies, and
  // perhaps end the step.
  template <typename What>
  void DieIn(const What& what) {
    harness_.Close();  // no threads in this process when it forks
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      harness_.setup().workers = 1;
      what();
      ::_exit(2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
  }
  void DieInStep3(Instant instant) {
    DieIn([&] {
      Killer killer(instant);
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      TakeStep3(&harness_);
    });
  }
  // Restores the memory in which the ranks still hold the gradients of step 3.
  void RememberGradients() { harness_.SetGradients(harness_.RandomTensors(3)); }
  // The size of the gradients that rank 1 pushes in step 3, which lie before
  // those of the parameter that is left out.
  static uint64_t BytesOfB() { return 9000 * 2; }
  // Reopens with rank 1, which has the gradients of the part that is not
  // updated yet.
  void ReopenWithRank1() {
    ASSERT_TRUE(harness_.Open().ok());
    RememberGradients();
    ASSERT_TRUE(harness_.Register(1).ok());
    ASSERT_TRUE(harness_.Attach(1).ok());
  }
  // Reopens with rank 0, whose gradients were kept; rank 1 is away.
  void ReopenWithRank0() {
    ASSERT_TRUE(harness_.Open().ok());  // only to know the sizes
    RememberGradients();
    std::vector<KeptGradients> kept;
    kept.push_back(harness_.KeepGradients(0, 4096));
    harness_.Close();
    ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
    ASSERT_TRUE(harness_.Register(0).ok());
    ASSERT_TRUE(harness_.Attach(0).ok());
  }
  // Reopens with rank 0 and lets the job fail.
  void FailWithRank0() {
    ASSERT_NO_FATAL_FAILURE(ReopenWithRank0());
    harness_.job().GiveUp({.rank = 1, .client_instance = kInstance + 1});
    ASSERT_EQ(phase(), v1::JOB_PHASE_FAILED);
  }
  std::string Path(const std::string& file) const {
    return harness_.directory() + "/state/" + file;
  }
  uint64_t committed_step() {
    return harness_.job().Describe().committed_step();
  }
  v1::JobPhase phase() { return harness_.job().Describe().phase(); }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(2, AdamHyperparams());
  JobHarness harness_;
  std::string committed_;
  std::string expected_;
};

class DiesInside : public JobCrashTest,
                   public ::testing::WithParamInterface<Instant> {};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_JOB_CRASH_FIXTURE_H_
