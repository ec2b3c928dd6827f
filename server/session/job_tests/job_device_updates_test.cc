// Jobs of which devices update a part: the same bits whatever the part, while
// it changes, when a device fails, and when the engine is killed.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/test_seed.h"
#include "server/session/testing/device_jobs.h"
#include "server/session/testing/job_crash_fixture.h"
#include "server/session/testing/job_harness.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_runtime.h"
#include "storage/format/control_file.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

uint64_t ResidentBytesOf(JobHarness* job) {
  uint64_t bytes = 0;
  const v1::DeviceUpdates updates = job->job().Describe().device_updates();
  for (const v1::DeviceUse& use : updates.uses()) bytes += use.resident_bytes();
  return bytes;
}

v1::DeviceUpdates UpdatesOf(JobHarness* job) {
  return job->job().Describe().device_updates();
}

class JobDeviceUpdatesTest : public testing::TestWithParam<v1::Placement> {
 protected:
  JobDeviceUpdatesTest() {
    JobHarness::Setup setup = SetupOf(1);
    setup.storage.clear_offload_fraction();
    setup.devices = "none";
    plain_ = std::make_unique<JobHarness>(setup);
    plain_->Start(plain_->RandomTensors(kSeed));
  }

  // Starts a job that shares, with the same masters.
  void Start(const JobHarness::Setup& setup) {
    job_ = std::make_unique<JobHarness>(setup);
    job_->Start(job_->RandomTensors(kSeed));
  }
  void ExpectSameAfter(uint64_t first, uint64_t last) {
    TakeSteps(plain_.get(), first, last);
    TakeSteps(job_.get(), first, last);
    EXPECT_EQ(job_->StateBytes(), plain_->StateBytes()) << last;
  }

  std::unique_ptr<JobHarness> plain_;  // updated by the CPU alone
  std::unique_ptr<JobHarness> job_;
};

TEST_P(JobDeviceUpdatesTest, EveryFractionGivesTheSameBits) {
  for (const double fraction : {0.0, 0.3, 1.0}) {
    Start(SetupOf(fraction, GetParam()));
    TakeSteps(job_.get(), 1, 3);
    JobHarness::Setup alone = SetupOf(1);
    JobHarness plain(alone);
    plain.Start(plain.RandomTensors(kSeed));
    TakeSteps(&plain, 1, 3);
    EXPECT_EQ(job_->StateBytes(), plain.StateBytes()) << fraction;
    const v1::DeviceUpdates updates = UpdatesOf(job_.get());
    EXPECT_EQ(updates.problem(), "");
    if (fraction == 1) {
      EXPECT_FALSE(job_->job().Describe().has_device_updates());
      continue;
    }
    EXPECT_THAT(updates.devices(), SizeIs(2));
    EXPECT_EQ(updates.offload_fraction(), fraction);
    const double elements = 3 * (30000 + 7001 + 3);
    EXPECT_EQ(updates.device_elements() + updates.cpu_elements(), elements);
    ASSERT_THAT(updates.uses(), SizeIs(2));
    uint64_t by_devices = 0;
    for (const v1::DeviceUse& use : updates.uses()) {
      EXPECT_EQ(updates.devices(static_cast<int>(use.index())), use.name());
      EXPECT_GT(use.buffer_bytes(), 0u);
      EXPECT_LT(use.buffer_bytes(), use.memory_bytes());
      by_devices += use.elements();
    }
    EXPECT_EQ(by_devices, updates.device_elements());
    // Tiles are whole.
    EXPECT_NEAR(static_cast<double>(updates.cpu_elements()),
                fraction * elements, 3 * 4096);
  }
}

// Optimizers that need a whole parameter to update one element.
TEST_P(JobDeviceUpdatesTest, WholeParametersHaveTheSameBits) {
  const auto setup_of = [](OptimizerKind optimizer, double fraction,
                           v1::Placement placement) {
    JobHarness::Setup setup = SetupOf(fraction, placement);
    setup.layout.optimizer = optimizer;
    setup.layout.parameters[0].shape = {60, 500};
    setup.layout.parameters[1].shape = {1, 7001};
    setup.layout.parameters[2].shape = {3, 1};
    return setup;
  };
  for (const OptimizerKind optimizer :
       {OptimizerKind::kLamb, OptimizerKind::kAdafactor,
        OptimizerKind::kMuon}) {
    JobHarness plain(setup_of(optimizer, 1, v1::PLACEMENT_HOST));
    plain.Start(plain.RandomTensors(kSeed));
    TakeSteps(&plain, 1, 3);
    for (const double fraction : {0.0, 0.5}) {
      Start(setup_of(optimizer, fraction, GetParam()));
      TakeSteps(job_.get(), 1, 3);
      EXPECT_EQ(job_->StateBytes(), plain.StateBytes()) << fraction;
      const v1::DeviceUpdates updates = UpdatesOf(job_.get());
      EXPECT_EQ(updates.problem(), "");
      EXPECT_EQ(updates.too_large_elements(), 0u);
      EXPECT_GT(updates.device_elements(), 0u);
      EXPECT_EQ(updates.cpu_elements() == 0, fraction == 0);
    }
  }
}

TEST_P(JobDeviceUpdatesTest, TheFractionChangesBetweenSteps) {
  Start(SetupOf(1, GetParam()));
  uint64_t step = 0;
  for (const double fraction : {0.0, 0.3, 1.0, 0.7, 0.0, 1.0}) {
    const auto reply = SetFraction(job_.get(), fraction);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->storage().offload_fraction(), fraction);
    ExpectSameAfter(step + 1, step + 2);
    step += 2;
  }
}

TEST_P(JobDeviceUpdatesTest,
       TheNextEngineHasTheFractionAndScriptsAskForEither) {
  Start(SetupOf(0.5, GetParam()));
  ASSERT_TRUE(SetFraction(job_.get(), 0.25).ok());
  job_->Close();
  ASSERT_TRUE(job_->Open().ok());
  EXPECT_EQ(UpdatesOf(job_.get()).offload_fraction(), 0.25);
  for (const double asked : {0.5, 0.25}) {
    job_->setup().storage.set_offload_fraction(asked);
    EXPECT_TRUE(job_->Register(0).ok()) << asked;
  }
  job_->setup().storage.set_offload_fraction(0.75);
  const absl::Status other = job_->Register(0).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("offload_fraction 0.25"));
  job_->setup().storage.clear_offload_fraction();
  job_->AttachAll();
  ExpectSameAfter(1, 2);
}

TEST_P(JobDeviceUpdatesTest, ADeviceThatIsLostCostsNoBits) {
  accelerator::EmulatedFaults faults;
  const auto runtime =
      accelerator::MakeEmulatedRuntime({.devices = 2, .faults = &faults});
  JobHarness::Setup setup = SetupOf(0.2, GetParam());
  setup.device_runtime = runtime.get();
  Start(setup);
  ExpectSameAfter(1, 2);
  EXPECT_EQ(UpdatesOf(job_.get()).problem(), "");
  faults.FailLaunchAfter(1);
  ExpectSameAfter(3, 4);
  EXPECT_THAT(UpdatesOf(job_.get()).problem(), HasSubstr("UNAVAILABLE"));
  faults.LoseAfter(3);
  ExpectSameAfter(5, 8);
  EXPECT_THAT(UpdatesOf(job_.get()).problem(), HasSubstr("INTERNAL"));
  const auto before = UpdatesOf(job_.get());
  ExpectSameAfter(9, 10);
  EXPECT_GT(UpdatesOf(job_.get()).cpu_elements(), before.cpu_elements());
  // The devices may be given back and asked for again.
  ASSERT_TRUE(SetFraction(job_.get(), 1).ok());
  ExpectSameAfter(11, 12);
  job_.reset();  // before the runtime
}

// One that is lost keeps no other from having records, whatever is changed.
TEST_P(JobDeviceUpdatesTest, OtherDevicesThanALostOneHaveRecords) {
  accelerator::EmulatedFaults faults;
  const auto runtime =
      accelerator::MakeEmulatedRuntime({.devices = 2, .faults = &faults});
  JobHarness::Setup setup = SetupOf(0, GetParam());
  setup.device_runtime = runtime.get();
  setup.storage.set_device_budget_bytes(8 << 20);
  Start(setup);
  ExpectSameAfter(1, 2);
  faults.LoseAfter(1);
  ExpectSameAfter(3, 6);
  const auto set = SetBudget(job_.get(), 16 << 20);
  ASSERT_TRUE(set.ok()) << set.status();
  ExpectSameAfter(7, 10);
  size_t lost = 0;
  const v1::DeviceUpdates updates = UpdatesOf(job_.get());
  for (const v1::DeviceUse& use : updates.uses()) {
    lost += use.is_lost() ? 1 : 0;
    EXPECT_EQ(use.resident_elements() == 0, use.is_lost());
  }
  EXPECT_EQ(lost, 1u);
  job_.reset();  // before the runtime
}

// A job does not depend on the node's devices.
TEST_P(JobDeviceUpdatesTest, ANodeThatLostItsDevicesGoesOnByTheCpu) {
  Start(SetupOf(0.2, GetParam()));
  ExpectSameAfter(1, 2);
  job_->Close();
  job_->setup().devices = "none";
  ASSERT_TRUE(job_->Open().ok());
  job_->AttachAll();
  EXPECT_THAT(UpdatesOf(job_.get()).problem(), HasSubstr("--devices"));
  ExpectSameAfter(3, 4);
  if (GetParam() == v1::PLACEMENT_NVME) {
    v1::SetJobRequest budget;
    budget.set_host_budget_bytes(1 << 22);
    const auto set = job_->job().Set(budget);
    EXPECT_TRUE(set.ok()) << set.status();
  }
  // Going back to the CPU needs none.
  EXPECT_TRUE(SetFraction(job_.get(), 1).ok());
  EXPECT_TRUE(
      absl::IsFailedPrecondition(SetFraction(job_.get(), 0.5).status()));
  ExpectSameAfter(5, 6);
}

std::atomic<int> runs_left = 0;
class KillerAtRun final : public scheduler::StepObserver {
 public:
  void OnRunUpdated(uint64_t, uint64_t) override {
    if (--runs_left == 0) ::kill(::getpid(), SIGKILL);
  }
};

// Kills the engine after a random number of runs, again and again, with another
// fraction each time.
TEST_P(JobDeviceUpdatesTest, AKilledEngineLeavesEveryByte) {
  std::mt19937 random(kernels::TestSeed());
  JobHarness::Setup setup = SetupOf(0.5, GetParam());
  setup.client_instance = kInstance;
  Start(setup);
  KillerAtRun killer;
  int killed = 0;
  for (uint64_t step = 1; step <= 20; ++step) {
    if (step % 3 == 0) {
      const double fractions[] = {0, 0.3, 0.6, 1};
      ASSERT_TRUE(SetFraction(job_.get(), fractions[random() % 4]).ok());
    }
    job_->Close();  // no threads in this process when it forks
    plain_->Close();
    runs_left = static_cast<int>(1 + random() % 12);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      job_->setup().observer = &killer;
      job_->setup().workers = 1;  // a second one could go on meanwhile
      if (!job_->Open().ok()) ::_exit(3);
      job_->AttachAll();
      TakeSteps(job_.get(), step, step);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) {
      ++killed;
    } else {
      ASSERT_EQ(WEXITSTATUS(status), 0);
    }
    ASSERT_TRUE(job_->Open().ok());
    job_->SetGradients(job_->RandomTensors(kSeed + step));
    job_->AttachAll();
    ASSERT_TRUE(plain_->Open().ok());
    plain_->AttachAll();
    TakeSteps(plain_.get(), step, step);
    ASSERT_EQ(job_->StateBytes(), plain_->StateBytes()) << "step " << step;
  }
  EXPECT_GT(killed, 10);
}

// Trains from `step` on until it is killed, and says which step it begins.
[[noreturn]] void TrainUntilKilled(JobHarness* job, uint64_t step,
                                   std::chrono::microseconds delay, int said) {
  job->setup().workers = 3;
  if (!job->Open().ok()) ::_exit(3);
  job->AttachAll();
  std::thread([delay] {
    std::this_thread::sleep_for(delay);
    ::kill(::getpid(), SIGKILL);
  }).detach();
  for (uint64_t k = step; k < step + 12; ++k) {
    if (::write(said, &k, sizeof(k)) != sizeof(k)) ::_exit(4);
    TakeSteps(job, k, k);
  }
  ::_exit(0);
}

// Returns the last step that a killed engine began; `before` when it began
// none.
uint64_t LastBegun(int said, uint64_t before) {
  uint64_t step = before;
  while (::read(said, &step, sizeof(step)) == sizeof(step)) continue;
  return step;
}

// Kills the engine at any instruction of any thread, some steps after it began,
// while records stay on devices, others are copied there, and the CPU updates
// the rest.
TEST_P(JobDeviceUpdatesTest, AKilledEngineLosesNothingThatStayedOnDevices) {
  if (GetParam() != v1::PLACEMENT_HOST) GTEST_SKIP() << "no record stays";
  std::mt19937 random(kernels::TestSeed());
  // Large enough for a part of the kills to come within the CPU's kernels.
  JobHarness::Setup setup = SetupOf(0.8);
  setup.layout.parameters[0] = MakeParameter("a", 200'000);
  setup.storage.set_device_budget_bytes(150'000);
  setup.client_instance = kInstance;
  Start(setup);
  setup.storage.Clear();
  setup.devices = "none";
  plain_ = std::make_unique<JobHarness>(setup);
  plain_->Start(plain_->RandomTensors(kSeed));
  uint64_t step = 1;
  // Doubled when an engine was killed before its first step, because a machine
  // that is busy takes longer for one.
  uint32_t delay_us_max = 20'000;
  // More when the machine is so slow that most engines die before a step.
  for (int i = 0; i < 80 || (step <= 40 && i < 800); ++i) {
    job_->Close();  // no threads in this process when it forks
    plain_->Close();
    int said[2];
    ASSERT_EQ(::pipe(said), 0);
    const std::chrono::microseconds delay(random() % delay_us_max);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) TrainUntilKilled(job_.get(), step, delay, said[1]);
    ::close(said[1]);
    const uint64_t begun = LastBegun(said[0], step - 1);
    ::close(said[0]);
    if (begun < step) delay_us_max = std::min(2 * delay_us_max, 1'000'000u);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
    ASSERT_TRUE(job_->Open().ok());
    job_->SetGradients(job_->RandomTensors(kSeed + begun));
    job_->AttachAll();
    const uint64_t committed = job_->job().Describe().committed_step();
    ASSERT_GE(committed + 1, begun);
    ASSERT_TRUE(plain_->Open().ok());
    plain_->AttachAll();
    TakeSteps(plain_.get(), step, committed);
    ASSERT_EQ(job_->StateBytes(), plain_->StateBytes())
        << "steps " << step << " to " << committed;
    step = committed + 1;
  }
  EXPECT_GT(step, 40u) << "the engines were killed too early";
}

INSTANTIATE_TEST_SUITE_P(Placements, JobDeviceUpdatesTest,
                         testing::Values(v1::PLACEMENT_HOST,
                                         v1::PLACEMENT_NVME),
                         [](const testing::TestParamInfo<v1::Placement>& of) {
                           return of.param == v1::PLACEMENT_HOST ? "Host"
                                                                 : "Nvme";
                         });

TEST(JobDeviceBudgetTest, ItChangesBetweenStepsAndTheNextEngineHasIt) {
  JobHarness::Setup alone = KeepingSetup(0);
  alone.storage.clear_offload_fraction();
  alone.devices = "none";
  JobHarness plain(alone);
  plain.Start(plain.RandomTensors(kSeed));
  JobHarness job(KeepingSetup(64 << 20));
  job.Start(job.RandomTensors(kSeed));
  uint64_t step = 0;
  const auto expect_same = [&] {
    TakeSteps(&plain, step + 1, step + 6);
    TakeSteps(&job, step + 1, step + 6);
    step += 6;
    EXPECT_EQ(ResidentBytesOf(&job) > 0,
              job.job().Describe().storage().device_budget_bytes() > 0);
    EXPECT_EQ(job.StateBytes(), plain.StateBytes()) << step;
    EXPECT_EQ(UpdatesOf(&job).problem(), "");
  };
  expect_same();
  for (const uint64_t budget : {uint64_t{0}, uint64_t{32} << 20}) {
    const auto reply = SetBudget(&job, budget);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->storage().device_budget_bytes(), budget);
    expect_same();
  }
  job.Close();
  ASSERT_TRUE(job.Open().ok());
  job.AttachAll();  // which asks for what the job was made with
  EXPECT_EQ(job.job().Describe().storage().device_budget_bytes(), 32u << 20);
  expect_same();
}

// Returns the format that the job's control file has just now.
uint32_t ControlVersionOf(const JobHarness& job) {
  std::ifstream file(job.directory() + "/state/control", std::ios::binary);
  file.seekg(offsetof(storage::ControlFile, version));
  uint32_t version = 0;
  file.read(reinterpret_cast<char*>(&version), sizeof(version));
  EXPECT_TRUE(file.good()) << "no control file";
  return version;
}

TEST(JobDeviceBudgetTest, AJobWithoutElementsHasAFractionToo) {
  JobHarness::Setup setup = KeepingSetup(1 << 20);
  setup.layout.parameters = {MakeParameter("none", 0)};
  setup.storage.set_offload_fraction(0.5);
  JobHarness job(setup);
  job.Start(job.RandomTensors(1));
  TakeSteps(&job, 1, 2);
  EXPECT_EQ(job.job().Describe().committed_step(), 2u);
}

// Returns the first bytes of the job's log, as text.
std::string LogMagicOf(const JobHarness& job) {
  std::ifstream file(job.directory() + "/state/gradient_log", std::ios::binary);
  std::string magic(8, '\0');
  file.read(magic.data(), static_cast<std::streamsize>(magic.size()));
  EXPECT_TRUE(file.good()) << "no log";
  return magic;
}

class JobOfOlderBuildsTest : public ::testing::TestWithParam<uint32_t> {};

// An upgrade may put an older build in the place of this one, which knows no
// log of sums, not even an empty one.
TEST_P(JobOfOlderBuildsTest, AStoppedEngineLeavesFilesThatTheyRead) {
  const auto of_ranks = [](JobHarness::Setup setup) {
    setup.world_size = GetParam();
    setup.partition = PartitionMode::kReplicated;
    return setup;
  };
  JobHarness::Setup alone = of_ranks(KeepingSetup(0));
  alone.storage.clear_offload_fraction();
  alone.devices = "none";
  JobHarness plain(alone);
  plain.Start(plain.RandomTensors(kSeed));
  JobHarness job(of_ranks(KeepingSetup(64 << 20)));
  job.Start(job.RandomTensors(kSeed));
  TakeSteps(&plain, 1, 7);
  TakeSteps(&job, 1, 7);
  ASSERT_GT(ResidentBytesOf(&job), 0u);
  const bool has_sums = GetParam() > 1;
  EXPECT_EQ(ControlVersionOf(job), has_sums
                                       ? storage::kControlVersionLaggingSums
                                       : storage::kControlVersionLagging);
  EXPECT_EQ(LogMagicOf(job), has_sums ? "GRADLOG2" : "GRADLOG1");
  job.job().Stop();
  EXPECT_EQ(ControlVersionOf(job), storage::kControlVersion);
  EXPECT_EQ(LogMagicOf(job), "GRADLOG1");
  job.Close();
  // The next engine finds whole records without any device.
  job.setup().devices = "none";
  ASSERT_TRUE(job.Open().ok());
  job.AttachAll();
  EXPECT_EQ(job.StateBytes(), plain.StateBytes());
}

INSTANTIATE_TEST_SUITE_P(Ranks, JobOfOlderBuildsTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace optstate::session
