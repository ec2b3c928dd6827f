// Jobs whose optimizers need whole parameters, of which devices keep copies:
// the same bits whatever is kept, over loads, changes, losses and kills.

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <memory>
#include <new>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/test_seed.h"
#include "server/session/testing/device_jobs.h"
#include "server/session/testing/job_crash_fixture.h"
#include "server/session/testing/job_harness.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPlenty = uint64_t{16} << 20;
constexpr uint64_t kElements = 30000 + 7001 + 3;

struct Case {
  OptimizerKind optimizer = OptimizerKind::kLamb;
  v1::Placement placement = v1::PLACEMENT_HOST;
};

class JobKeptParametersTest : public testing::TestWithParam<Case> {
 protected:
  static JobHarness::Setup SetupFor(double fraction, uint64_t budget) {
    JobHarness::Setup setup = SetupOf(fraction, GetParam().placement);
    setup.layout.optimizer = GetParam().optimizer;
    setup.layout.parameters[0].shape = {60, 500};
    setup.layout.parameters[1].shape = {1, 7001};
    setup.layout.parameters[2].shape = {3, 1};
    setup.storage.set_device_budget_bytes(budget);
    setup.client_instance = kInstance;
    return setup;
  }
  void Start(const JobHarness::Setup& setup) {
    job_ = std::make_unique<JobHarness>(setup);
    job_->Start(job_->RandomTensors(kSeed));
    JobHarness::Setup alone = setup;
    alone.storage.Clear();
    alone.devices = "none";
    alone.device_runtime = nullptr;
    plain_ = std::make_unique<JobHarness>(alone);
    plain_->Start(plain_->RandomTensors(kSeed));
  }
  void ExpectSameAfter(uint64_t first, uint64_t last) {
    TakeSteps(plain_.get(), first, last);
    TakeSteps(job_.get(), first, last);
    EXPECT_EQ(job_->StateBytes(), plain_->StateBytes()) << last;
  }
  v1::DeviceUpdates Updates() {
    return job_->job().Describe().device_updates();
  }
  uint64_t KeptElements() {
    uint64_t elements = 0;
    const v1::DeviceUpdates updates = Updates();
    for (const v1::DeviceUse& use : updates.uses()) {
      elements += use.resident_elements();
    }
    return elements;
  }

  std::unique_ptr<JobHarness> plain_;  // updated by the CPU alone
  std::unique_ptr<JobHarness> job_;
};

TEST_P(JobKeptParametersTest, BudgetAndFractionChangeBetweenSteps) {
  Start(SetupFor(0, kPlenty));
  ExpectSameAfter(1, 3);
  EXPECT_EQ(KeptElements(), kElements);
  EXPECT_EQ(Updates().cpu_elements(), 0u);
  EXPECT_EQ(Updates().log_bytes(), 0u) << "nothing lags behind";
  uint64_t step = 3;
  for (const uint64_t budget : {uint64_t{0}, uint64_t{100'000}, kPlenty}) {
    for (const double fraction : {0.4, 0.0}) {
      ASSERT_TRUE(SetBudget(job_.get(), budget).ok());
      ASSERT_TRUE(SetFraction(job_.get(), fraction).ok());
      ExpectSameAfter(step + 1, step + 2);
      step += 2;
      // With 0.4 the devices' parameter has no room in the smaller budget.
      if (fraction == 0 || budget == 0) {
        EXPECT_EQ(KeptElements() > 0, budget > 0);
      }
      EXPECT_EQ(Updates().problem(), "");
    }
  }
  // The next engine has them too.
  job_->Close();
  ASSERT_TRUE(job_->Open().ok());
  job_->AttachAll();
  ExpectSameAfter(step + 1, step + 2);
  EXPECT_EQ(KeptElements(), kElements);
}

// A load is of some parameters, or of all.
TEST_P(JobKeptParametersTest, ALoadReplacesWhatDevicesHave) {
  Start(SetupFor(0, kPlenty));
  ExpectSameAfter(1, 2);
  for (JobHarness* const job : {plain_.get(), job_.get()}) {
    ASSERT_TRUE(job->job().BeginLoad(0).ok());
    ASSERT_TRUE(job->LoadMaster(0, 0, job->RandomTensors(kSeed + 100)[0]).ok());
    ASSERT_TRUE(job->FinishAll().status.ok());
  }
  ExpectSameAfter(3, 4);
  for (JobHarness* const job : {plain_.get(), job_.get()}) {
    ASSERT_TRUE(job->job().BeginLoad(0).ok());
    const auto masters = job->RandomTensors(kSeed + 200);
    for (uint32_t p = 0; p < masters.size(); ++p) {
      ASSERT_TRUE(job->LoadMaster(0, p, masters[p]).ok());
    }
    ASSERT_TRUE(job->FinishAll().status.ok());
  }
  ExpectSameAfter(5, 6);
}

TEST_P(JobKeptParametersTest, ADeviceThatIsLostCostsNoBits) {
  accelerator::EmulatedFaults faults;
  const auto runtime =
      accelerator::MakeEmulatedRuntime({.devices = 2, .faults = &faults});
  JobHarness::Setup setup = SetupFor(0, kPlenty);
  setup.device_runtime = runtime.get();
  Start(setup);
  ExpectSameAfter(1, 2);
  faults.FailLaunchAfter(0);
  ExpectSameAfter(3, 4);
  EXPECT_THAT(Updates().problem(), HasSubstr("UNAVAILABLE"));
  faults.LoseAfter(2);
  ExpectSameAfter(5, 8);
  EXPECT_THAT(Updates().problem(), HasSubstr("INTERNAL"));
  job_.reset();  // before the runtime
}

std::atomic<int> runs_left = 0;
class KillerAtRun final : public scheduler::StepObserver {
 public:
  void OnRunUpdated(uint64_t, uint64_t) override {
    if (--runs_left == 0) ::kill(::getpid(), SIGKILL);
  }
};

// Kills the engine in a step, behind some with copies, again and again.
TEST_P(JobKeptParametersTest, AKilledEngineLeavesEveryByte) {
  std::mt19937 random(kernels::TestSeed());
  Start(SetupFor(0, 200'000));
  KillerAtRun killer;
  void* const shared =
      ::mmap(nullptr, sizeof(std::atomic<uint64_t>), PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto& begun = *new (shared) std::atomic<uint64_t>(0);  // by the engines
  int killed = 0;
  uint64_t step = 1;
  for (int i = 0; i < 8; ++i) {
    job_->Close();  // no threads in this process when it forks
    plain_->Close();
    // A step has eleven runs.
    runs_left = static_cast<int>(12 + random() % 24);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      job_->setup().observer = &killer;
      job_->setup().workers = 1;  // a second one could go on meanwhile
      if (!job_->Open().ok()) ::_exit(3);
      job_->AttachAll();
      for (uint64_t k = step; k < step + 3; ++k) {
        begun = k;
        TakeSteps(job_.get(), k, k);
      }
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    killed += WIFSIGNALED(status) ? 1 : 0;
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    ASSERT_TRUE(job_->Open().ok());
    job_->SetGradients(job_->RandomTensors(kSeed + begun));
    job_->AttachAll();
    const uint64_t committed = job_->job().Describe().committed_step();
    ASSERT_TRUE(plain_->Open().ok());
    plain_->AttachAll();
    TakeSteps(plain_.get(), step, committed);
    ASSERT_EQ(job_->StateBytes(), plain_->StateBytes())
        << "steps " << step << " to " << committed;
    step = committed + 1;
  }
  EXPECT_GT(killed, 4);
  EXPECT_GT(step, 8u);
  ::munmap(shared, sizeof(std::atomic<uint64_t>));
}

// Earlier builds open the job: no record of it lags behind.
TEST_P(JobKeptParametersTest, ThereIsNoLog) {
  Start(SetupFor(0, kPlenty));
  ExpectSameAfter(1, 2);
  const std::ifstream log(job_->directory() + "/state/gradient_log");
  EXPECT_FALSE(log.is_open());
}

INSTANTIATE_TEST_SUITE_P(
    Optimizers, JobKeptParametersTest,
    testing::Values(Case{OptimizerKind::kLamb, v1::PLACEMENT_HOST},
                    Case{OptimizerKind::kLamb, v1::PLACEMENT_NVME},
                    Case{OptimizerKind::kAdafactor, v1::PLACEMENT_HOST},
                    Case{OptimizerKind::kMuon, v1::PLACEMENT_HOST}),
    [](const testing::TestParamInfo<Case>& of) {
      return std::string(InfoOf(of.param.optimizer).name) +
             (of.param.placement == v1::PLACEMENT_HOST ? "_host" : "_nvme");
    });

}  // namespace
}  // namespace optstate::session
