// Engines that are killed while records are written anew on disk: the job is as
// before or as after.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <random>
#include <string>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/captured_log.h"
#include "server/session/testing/job_harness.h"
#include "server/session/testing/rearrange_fixture.h"
#include "storage/persist_in_order.h"

namespace optstate::session {
namespace {

int points_left = 0;
void DieAtPoint(storage::PersistPoint /*point*/) {
  if (--points_left == 0) ::kill(::getpid(), SIGKILL);
}

// The engine dies while the records are written anew: at one store of its
// tables after another, and at random instants.
class JobRearrangeCrashTest : public RearrangeFixture {
 protected:
  using Microseconds = std::chrono::microseconds;

  // Runs `act` on the job, opened in a child process, which is killed at the
  // given store; 0: after so long; -1: not at all. Returns whether it was
  // killed in the act. No threads of this process are alive when it forks.
  static bool RunAndDie(JobHarness* job, int point, Microseconds after,
                        absl::FunctionRef<absl::Status()> act) {
    job->Close();
    const pid_t child = ::fork();
    if (child == 0) {
      if (!job->Open().ok()) ::_exit(3);
      points_left = point;
      if (point > 0) storage::persist_hook.store(&DieAtPoint);
      if (point == 0) {
        std::thread([after] {
          std::this_thread::sleep_for(after);
          ::kill(::getpid(), SIGKILL);
        }).detach();
      }
      const absl::Status done = act();
      if (!done.ok()) std::cerr << done << std::endl;
      ::_exit(done.ok() ? 0 : 4);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) return true;
    EXPECT_EQ(WEXITSTATUS(status), 0);
    return false;
  }
  // Returns how long it takes unless the process is killed.
  static Microseconds Measure(JobHarness* job,
                              absl::FunctionRef<absl::Status()> act) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FALSE(RunAndDie(job, -1, {}, act));
    return std::chrono::duration_cast<Microseconds>(
        std::chrono::steady_clock::now() - begin);
  }
  Microseconds Within(Microseconds whole) {
    return Microseconds(random_() % static_cast<uint64_t>(whole.count()));
  }
  // Opens the job after its engine was killed. What that left of two
  // arrangements on a disk is removed, which the log says, once. Returns
  // whether there was any.
  static bool OpenAfterKill(JobHarness* job) {
    bool has_left = false;
    for (uint32_t i = 0; i < job->Disks().size(); ++i) {
      const std::string folder = FolderOf(*job, i);
      has_left |= std::filesystem::exists(folder + "/records") &&
                  std::filesystem::exists(folder + "/records.1");
    }
    constexpr char kSays[] = "info removed what was left";
    const CapturedLog log;
    EXPECT_EQ(job->Open(), absl::OkStatus());
    if (has_left) {
      EXPECT_THAT(log.Text(), testing::HasSubstr(kSays));
    }
    const CapturedLog next;
    job->Close();
    EXPECT_EQ(job->Open(), absl::OkStatus());
    EXPECT_THAT(next.Text(), testing::Not(testing::HasSubstr(kSays)));
    return has_left;
  }
  static bool MayLoseMemory() {
    return GetParam().durability == v1::DURABILITY_KIND_STEP;
  }

  std::mt19937_64 random_{kSeed};
};

TEST_P(JobRearrangeCrashTest, AKilledEngineLeavesTheJobAsBeforeOrAsAfter) {
  constexpr int kRounds = 24;
  StartBoth();
  on_disk_.setup().workers = 1;
  Weights weights = {1, 0, 0};
  const auto split = [&] {
    on_disk_.AttachAll();
    return SetWeights(&on_disk_, weights).status();
  };
  in_memory_.Close();
  const Microseconds whole = Measure(&on_disk_, split);
  ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
  int killed = 0, changed = 0, left = 0;
  for (int round = 1; round <= kRounds; ++round) {
    for (uint32_t& weight : weights) {
      weight = static_cast<uint32_t>(random_() % 3);
    }
    weights[random_() % kDisks] += 1;
    const uint64_t before = on_disk_.job().Describe().storage().arrangement();
    in_memory_.Close();
    if (RunAndDie(&on_disk_, round % 2 == 0 ? round : 0, Within(whole),
                  split)) {
      ++killed;
    }
    if (MayLoseMemory() && round % 3 == 0) on_disk_.DropMemory();
    if (OpenAfterKill(&on_disk_)) ++left;
    ASSERT_FALSE(HasFailure()) << round;
    const v1::StorageSettings now = on_disk_.job().Describe().storage();
    EXPECT_EQ(CountFolders(on_disk_), now.directories()) << round;
    EXPECT_LE(now.arrangement(), before + 1);
    if (now.arrangement() != before) ++changed;
    on_disk_.AttachAll();
    ASSERT_EQ(in_memory_.Open(), absl::OkStatus());
    in_memory_.AttachAll();
    ExpectSameBits();
    TrainBoth();
    ExpectSameBits();
  }
  std::cerr << killed << " of " << kRounds << " engines were killed, "
            << changed << " changes were made, files of two arrangements were "
            << "left " << left << " times" << std::endl;
  EXPECT_GT(killed, kRounds / 4);
  EXPECT_GT(changed, 0);
  EXPECT_GT(left, 0);
}

TEST_P(JobRearrangeCrashTest, SoItDoesWhileParametersAreAdded) {
  constexpr int kRounds = 12;
  in_memory_.Start(in_memory_.RandomTensors(kSeed));
  Train(&in_memory_, 1, 2);
  const std::string before = in_memory_.StateBytes();
  ASSERT_EQ(Extend(&in_memory_), absl::OkStatus());
  LoadAdded(&in_memory_);
  Train(&in_memory_, 3, 3);
  const std::string after = in_memory_.StateBytes();
  in_memory_.Close();
  on_disk_.Close();
  int killed = 0, extended = 0, left = 0;
  Microseconds whole;
  for (int round = 0; round <= kRounds; ++round) {
    JobHarness::Setup setup = SetupOf(GetParam());
    setup.workers = 1;
    JobHarness job(setup);
    job.Start(job.RandomTensors(kSeed));
    Train(&job, 1, 2);
    const auto extend = [&] { return Extend(&job); };
    if (round == 0) {
      whole = Measure(&job, extend);
    } else if (RunAndDie(&job, round % 2 == 0 ? round : 0, Within(whole),
                         extend)) {
      ++killed;
    }
    if (MayLoseMemory() && round % 3 == 0) job.DropMemory();
    if (OpenAfterKill(&job)) ++left;
    ASSERT_FALSE(HasFailure()) << round;
    EXPECT_EQ(CountFolders(job), kDisks) << round;
    EXPECT_EQ(job.job().Describe().committed_step(), 2u);
    if (job.job().Describe().parameter_count() == 4) {
      ++extended;
      EXPECT_EQ(job.job().Describe().phase(), v1::JOB_PHASE_LOADING);
    } else {
      EXPECT_EQ(job.job().Describe().phase(), v1::JOB_PHASE_READY);
      job.AttachAll();
      EXPECT_TRUE(job.StateBytes() == before) << round;
    }
    ASSERT_EQ(Extend(&job), absl::OkStatus()) << round;
    LoadAdded(&job);
    Train(&job, 3, 3);
    ASSERT_TRUE(job.StateBytes() == after) << round;
  }
  std::cerr << killed << " of " << kRounds << " engines were killed, "
            << extended << " extensions were made, files of two arrangements "
            << "were left " << left << " times" << std::endl;
  EXPECT_GT(killed, kRounds / 4);
  EXPECT_GT(extended, 0);
  EXPECT_GT(left, 0);
}

INSTANTIATE_TEST_SUITE_P(Kinds, JobRearrangeCrashTest,
                         testing::ValuesIn(kKinds), NameOf);

}  // namespace
}  // namespace optstate::session
