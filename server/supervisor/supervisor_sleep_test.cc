// Jobs that are put to sleep and woken, with a supervisor that stops and dies
// in between.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/observe/event_log.h"
#include "server/supervisor/sleep/job_sleeper.h"
#include "server/supervisor/sleep/sleep_operation.h"
#include "server/supervisor/supervisor_fixture.h"
#include "server/supervisor/supervisor_harness.h"
#include "storage/testing/test_mounts.h"
#include "storage/tmpfs_info.h"

namespace optstate::supervisor {
namespace {

const access::Caller kSelf = access::UnixCaller(::geteuid());

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class SupervisorSleepTest : public SupervisorTest {
 protected:
  void SetUp() override {
    disk_ = testing::TempDir() + "/supervisor_sleep-XXXXXX";
    ASSERT_NE(::mkdtemp(disk_.data()), nullptr);
    const auto info = storage::InspectDirectory(disk_);
    ASSERT_TRUE(info.ok()) << info.status();
    if (info->is_tmpfs) GTEST_SKIP() << disk_ << " is in memory";
    harness_.config().set_sleep_directory(disk_);
  }
  void TearDown() override {
    harness_.Stop();  // it removes files on a thread of its own
    fs::remove_all(disk_);
  }

  // Makes a job with a file of state, to which no rank is attached.
  void MakeJob(const std::string& job) {
    MustOpen(job);
    fs::create_directories(harness_.JobDirectory(job) + "/state");
    std::ofstream(StateFile(job)) << "state of " << job;
    ASSERT_TRUE(SupervisorHarness::Eventually([&] {
      const auto found = harness_.Find(job);
      return found.has_value() && found->engine_pid != 0;
    }));
  }
  std::string StateFile(const std::string& job) const {
    return harness_.JobDirectory(job) + "/state/control";
  }
  bool HasState(const std::string& job) const {
    std::ifstream file(StateFile(job));
    std::string text(std::istreambuf_iterator<char>(file), {});
    return text == "state of " + job;
  }

  absl::StatusOr<std::shared_ptr<SleepOperation>> BeginSleep(
      const std::string& job) {
    Supervisor& supervisor = harness_.supervisor();
    const absl::Status held = supervisor.HoldJob(job, kSelf);
    if (!held.ok()) return held;
    const auto found = harness_.Find(job);
    auto operation =
        supervisor.PutToSleep(job, found.has_value() ? found->engine_pid : 0);
    if (!operation.ok()) supervisor.ReleaseJob(job);
    return operation;
  }
  static absl::Status End(
      const absl::StatusOr<std::shared_ptr<SleepOperation>>& operation) {
    if (!operation.ok()) return operation.status();
    if (!(*operation)->AwaitEnd(absl::Now() + SupervisorHarness::kPatience)) {
      return absl::DeadlineExceededError("the operation does not end");
    }
    return (*operation)->status();
  }
  absl::Status Sleep(const std::string& job) { return End(BeginSleep(job)); }
  absl::Status Wake(const std::string& job) {
    return End(harness_.supervisor().WakeJob(job, kSelf));
  }
  bool IsAsleep(const std::string& job) {
    const auto found = harness_.Find(job);
    return found.has_value() && found->sleep.has_value() &&
           found->sleep->directory() == disk_ + "/jobs/" + job &&
           found->sleep->progress().empty() && found->engine_pid == 0;
  }

  // Returns the events of ways to sleep or awake, without the engine's.
  static std::vector<v1::Event> SleepEventsAfter(uint64_t sequence,
                                                 const std::string& job) {
    std::vector<v1::Event> found;
    for (const v1::Event& event : observe::Events().After(sequence, job)) {
      const std::string& kind = event.kind();
      if (kind == "job_asleep" || kind == "job_awake" ||
          kind == "job_sleep_failed" || kind == "job_wake_failed") {
        found.push_back(event);
      }
    }
    return found;
  }

  std::string disk_;
};

TEST_F(SupervisorSleepTest, AJobSleepsAndWakes) {
  harness_.Start();
  MakeJob("a");
  const absl::Status slept = Sleep("a");
  ASSERT_TRUE(slept.ok()) << slept;
  EXPECT_TRUE(IsAsleep("a"));
  EXPECT_FALSE(Exists(StateFile("a")));
  const absl::Status refused = harness_.Open("a").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("optctl wake a"));
  const absl::Status woken = Wake("a");
  ASSERT_TRUE(woken.ok()) << woken;
  EXPECT_TRUE(HasState("a"));
  EXPECT_FALSE(IsAsleep("a"));
  EXPECT_FALSE(Exists(disk_ + "/jobs/a"));
  EXPECT_NE(MustOpen("a").engine_pid, 0u);
  EXPECT_TRUE(absl::IsFailedPrecondition(Wake("a")));
}

TEST_F(SupervisorSleepTest, TheWaysToSleepAndAwakeAreEvents) {
  const uint64_t before = observe::Events().Await(0, absl::InfinitePast());
  const auto last = [before](const std::string& kind) {
    const std::vector<v1::Event> events = observe::Events().After(before, "a");
    // The engine's events come between.
    for (auto it = events.rbegin(); it != events.rend(); ++it) {
      if (it->kind() == kind) return *it;
    }
    return v1::Event();
  };
  harness_.Start();
  MakeJob("a");
  fs::create_directories(disk_ + "/jobs/a");  // the name is taken
  EXPECT_FALSE(Sleep("a").ok());
  EXPECT_THAT(last("job_sleep_failed").text(),
              ContainsRegex("^not put to sleep, after [0-9]+ bytes and "
                            "[0-9.]+ s: .*" +
                            disk_));
  EXPECT_EQ(last("job_sleep_failed").severity(), v1::EVENT_SEVERITY_ERROR);
  EXPECT_EQ(last("job_sleep_failed").owner_uid(), ::geteuid());
  fs::remove_all(disk_ + "/jobs/a");
  // Its engine is started again first.
  ASSERT_TRUE(SupervisorHarness::Eventually([&] { return Sleep("a").ok(); }));
  EXPECT_THAT(last("job_asleep").text(),
              ContainsRegex("^asleep in " + disk_ +
                            "/jobs/a: [0-9]+ bytes there, [0-9]+ bytes of "
                            "memory given back, in [0-9.]+ s$"));
  EXPECT_EQ(last("job_asleep").severity(), v1::EVENT_SEVERITY_INFO);
  const std::string copy = disk_ + "/jobs/a/files/state/control";
  std::ofstream(copy) << "State of a";
  EXPECT_FALSE(Wake("a").ok());
  EXPECT_THAT(last("job_wake_failed").text(),
              ContainsRegex("^not woken, after [0-9]+ bytes and [0-9.]+ s: "
                            "DATA_LOSS"));
  std::ofstream(copy) << "state of a";
  ASSERT_TRUE(Wake("a").ok());
  EXPECT_THAT(last("job_awake").text(),
              ContainsRegex("^awake: [0-9]+ bytes read back, [0-9]+ bytes of "
                            "memory taken again, in [0-9.]+ s$"));
}

// The next build tells what has become of what was under way.
TEST_F(SupervisorSleepTest, AnUpgradeTellsWhatItHasInterrupted) {
  harness_.Start();
  MakeJob("a");
  const pid_t engine = harness_.Find("a")->engine_pid;
  // It does not end, so that the copy does not begin.
  ASSERT_EQ(::kill(engine, SIGSTOP), 0);
  const auto operation = BeginSleep("a");
  ASSERT_TRUE(operation.ok()) << operation.status();
  harness_.HandOverSleeps();
  harness_.Abandon();
  const uint64_t before = observe::Events().Await(0, absl::InfinitePast());
  harness_.Start();
  ASSERT_EQ(::kill(engine, SIGCONT), 0);
  const std::vector<v1::Event> told = SleepEventsAfter(before, "a");
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].kind(), "job_sleep_failed");
  EXPECT_THAT(told[0].text(),
              ContainsRegex("^not put to sleep, after 0 bytes and [0-9.]+ s: "
                            "ABORTED: an upgrade of the daemon"));
  EXPECT_TRUE(HasState("a"));
}

TEST_F(SupervisorSleepTest, AnUpgradeTellsWhereAJobHasComeTo) {
  harness_.Start();
  MakeJob("sleeper");
  MakeJob("awake");
  ASSERT_TRUE(Sleep("sleeper").ok());
  const struct {
    const char* job;
    bool is_wake;
    const char* kind;
    const char* text;
  } cases[] = {
      {"sleeper", false, "job_asleep", "^asleep in .*/jobs/sleeper: [0-9]+"},
      {"sleeper", true, "job_wake_failed", "^not woken, after 7 bytes and"},
      {"awake", false, "job_sleep_failed", "^not put to sleep, after 7 bytes"},
      {"awake", true, "job_awake", "^awake: 5 bytes read back, 9 bytes of"},
      {"gone", true, nullptr, nullptr},
  };
  for (const auto& [job, is_wake, kind, text] : cases) {
    SleepingJobs::UnderWay interrupted;
    interrupted.set_job(job);
    interrupted.set_is_wake(is_wake);
    interrupted.set_began_at_ns(absl::ToUnixNanos(absl::Now()));
    interrupted.set_bytes(7);
    interrupted.set_disk_bytes(5);
    interrupted.set_memory_bytes(9);
    harness_.Abandon();
    harness_.set_interrupted_sleeps({interrupted});
    const uint64_t before = observe::Events().Await(0, absl::InfinitePast());
    harness_.Start();
    const std::vector<v1::Event> told = SleepEventsAfter(before, job);
    if (kind == nullptr) {
      EXPECT_TRUE(told.empty()) << job;
      continue;
    }
    ASSERT_EQ(told.size(), 1u) << job << ", " << is_wake;
    EXPECT_EQ(told[0].kind(), kind);
    EXPECT_THAT(told[0].text(), ContainsRegex(text));
    EXPECT_EQ(told[0].owner_uid(), ::geteuid());
  }
}

TEST_F(SupervisorSleepTest, AJobSleepsOverARestartAndAKill) {
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  harness_.Stop();
  harness_.Start();
  EXPECT_TRUE(IsAsleep("a"));
  harness_.Abandon();
  harness_.Start();
  EXPECT_TRUE(IsAsleep("a"));
  EXPECT_TRUE(Wake("a").ok());
  EXPECT_TRUE(HasState("a"));
}

TEST_F(SupervisorSleepTest, AJobSleepsOverALossOfMemory) {
  harness_.Start();
  MakeJob("a");
  MakeJob("b");
  ASSERT_TRUE(Sleep("a").ok());
  harness_.Stop();
  fs::remove_all(harness_.JobDirectory("a"));
  fs::remove_all(harness_.JobDirectory("b"));
  harness_.Start();
  EXPECT_TRUE(IsAsleep("a"));
  EXPECT_FALSE(harness_.Find("b").has_value());
  EXPECT_TRUE(Wake("a").ok());
  EXPECT_TRUE(HasState("a"));
}

TEST_F(SupervisorSleepTest, ASleepingJobIsDeletedWithItsFiles) {
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(supervisor.HoldJob("a", kSelf).ok());
  EXPECT_TRUE(absl::IsUnavailable(Wake("a")));
  supervisor.ReleaseJob("a");
  ASSERT_TRUE(supervisor.HoldJob("a", kSelf).ok());
  const absl::Status deleted =
      supervisor.DeleteHeldJob("a", absl::Now() + SupervisorHarness::kPatience);
  EXPECT_TRUE(deleted.ok()) << deleted;
  EXPECT_FALSE(harness_.Find("a").has_value());
  EXPECT_FALSE(Exists(disk_ + "/jobs/a"));
  EXPECT_FALSE(Exists(disk_ + "/jobs/.old-a"));
  // The name is free.
  MakeJob("a");
}

TEST_F(SupervisorSleepTest, ASleepingJobThatCannotBeDeletedSleepsOn) {
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  {
    // A mount point cannot be renamed.
    const auto mounted =
        storage::TestTmpfs::Mount(disk_ + "/jobs/a", "size=1m");
    if (absl::IsFailedPrecondition(mounted.status())) {
      GTEST_SKIP() << mounted.status();
    }
    ASSERT_TRUE(mounted.ok()) << mounted.status();
    Supervisor& supervisor = harness_.supervisor();
    ASSERT_TRUE(supervisor.HoldJob("a", kSelf).ok());
    EXPECT_FALSE(
        supervisor
            .DeleteHeldJob("a", absl::Now() + SupervisorHarness::kPatience)
            .ok());
    EXPECT_TRUE(IsAsleep("a"));
  }
  const absl::Status woken = Wake("a");
  EXPECT_TRUE(woken.ok()) << woken;
  EXPECT_TRUE(HasState("a"));
}

TEST_F(SupervisorSleepTest, OperationsOnASleepingJobAreRefused) {
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  Supervisor& supervisor = harness_.supervisor();
  const absl::Status recovered =
      supervisor.RecoverJob("a", kSelf, 0, /*to_durable=*/false);
  EXPECT_TRUE(absl::IsFailedPrecondition(recovered)) << recovered;
  EXPECT_THAT(std::string(recovered.message()), HasSubstr("asleep"));
  const absl::Time soon = absl::Now() + SupervisorHarness::kPatience;
  EXPECT_TRUE(
      absl::IsFailedPrecondition(supervisor.AwaitEngine("a", soon).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(supervisor.ReplaceEngine("a", soon)));
  EXPECT_TRUE(absl::IsFailedPrecondition(Sleep("a")));
  if (::geteuid() == 0) {
    EXPECT_TRUE(
        supervisor.WakeJob("a", access::UnixCaller(4711)).status().code() ==
        absl::StatusCode::kPermissionDenied);
  }
}

TEST_F(SupervisorSleepTest, ADamagedJobStaysAsleep) {
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  const std::string copy = disk_ + "/jobs/a/files/state/control";
  std::ofstream(copy) << "State of a";
  const absl::Status damaged = Wake("a");
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_THAT(std::string(damaged.message()), HasSubstr(copy));
  EXPECT_TRUE(IsAsleep("a"));
  std::ofstream(copy) << "state of a";
  EXPECT_TRUE(Wake("a").ok());
  EXPECT_TRUE(HasState("a"));
}

TEST_F(SupervisorSleepTest, TooLittleMemoryLeavesTheJobAsleep) {
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  harness_.Stop();
  harness_.config().mutable_limits()->set_job_state_bytes_max(1);
  harness_.Start();
  const absl::Status refused = Wake("a");
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_TRUE(IsAsleep("a"));
  harness_.Stop();
  harness_.config().mutable_limits()->set_job_state_bytes_max(0);
  harness_.Start();
  EXPECT_TRUE(Wake("a").ok());
}

// The files would go where no engine finds them.
TEST_F(SupervisorSleepTest, NoJobWakesIntoAStateDirectoryThatIsGone) {
  std::atomic<bool> is_in_place{true};
  harness_.set_check_state_directory([&is_in_place]() -> absl::Status {
    if (is_in_place) return absl::OkStatus();
    return absl::FailedPreconditionError("it was removed");
  });
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  is_in_place = false;
  const absl::Status refused = Wake("a");
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("it was removed"));
  EXPECT_TRUE(IsAsleep("a"));
  is_in_place = true;
  EXPECT_TRUE(Wake("a").ok());
  EXPECT_TRUE(HasState("a"));
  harness_.Stop();
}

TEST_F(SupervisorSleepTest, GradientsThatAreKeptKeepAJobAwake) {
  harness_.Start();
  const TestSession session = MustOpen("keeps");
  ASSERT_TRUE(SupervisorHarness::Eventually([&] {
    const auto found = harness_.Find("keeps");
    return found.has_value() && found->kept_count == 1;
  }));
  const absl::Status refused = Sleep("keeps");
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("gradients"));
}

TEST_F(SupervisorSleepTest, AnErrorOfTheDiskLeavesTheJobAwake) {
  harness_.Start();
  MakeJob("a");
  // The name is taken, by what is no job.
  fs::create_directories(disk_ + "/jobs/a");
  const absl::Status refused = Sleep("a");
  EXPECT_FALSE(refused.ok());
  ASSERT_TRUE(SupervisorHarness::Eventually([&] {
    const auto found = harness_.Find("a");
    return found.has_value() && found->engine_pid != 0;
  }));
  EXPECT_TRUE(HasState("a"));
  EXPECT_NE(MustOpen("a").engine_pid, 0u);
}

TEST_F(SupervisorSleepTest, ADaemonWithoutADirectorySaysWhatToSet) {
  harness_.config().clear_sleep_directory();
  harness_.Start();
  MakeJob("a");
  const absl::Status refused = Sleep("a");
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("sleep_directory"));
  EXPECT_NE(MustOpen("a").engine_pid, 0u);
}

// The records that a sleeping job has on disks outlive a daemon that does
// not find the rest of the job.
TEST_F(SupervisorSleepTest, RecordsOfASleepingJobThatIsNotFoundAreLeftAlone) {
  const std::string nvme = disk_ + "/nvme";
  ASSERT_TRUE(fs::create_directory(nvme));
  fs::permissions(nvme, fs::perms::owner_all);
  harness_.config().mutable_nvme()->add_directories(nvme);
  harness_.Start();
  MakeJob("a");
  const std::string records = nvme + "/jobs/a/records";
  fs::create_directory(nvme + "/jobs/a");
  std::ofstream(records) << "records of a";
  ASSERT_TRUE(Sleep("a").ok());
  EXPECT_TRUE(Exists(nvme + "/jobs/a/asleep"));
  harness_.Stop();
  fs::remove_all(harness_.JobDirectory("a"));
  fs::rename(disk_ + "/jobs/a", disk_ + "/elsewhere");
  harness_.Start();
  EXPECT_FALSE(harness_.Find("a").has_value());
  EXPECT_TRUE(Exists(records));
  const absl::Status refused = harness_.Open("a").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  harness_.Stop();
  fs::rename(disk_ + "/elsewhere", disk_ + "/jobs/a");
  harness_.Start();
  EXPECT_TRUE(IsAsleep("a"));
  ASSERT_TRUE(Wake("a").ok());
  EXPECT_TRUE(HasState("a"));
  EXPECT_TRUE(Exists(records));
  EXPECT_FALSE(Exists(nvme + "/jobs/a/asleep"));
}

// A rank would train from the beginning, without a word.
TEST_F(SupervisorSleepTest, ASleepingJobThatCannotBeReadIsNotBegunAnew) {
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  harness_.Stop();
  fs::remove_all(harness_.JobDirectory("a"));
  const std::string folder = disk_ + "/jobs/a";
  std::ofstream(folder + "/manifest") << "damaged";
  harness_.Start();
  EXPECT_FALSE(harness_.Find("a").has_value());
  const absl::Status refused = harness_.Open("a").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(folder));
  EXPECT_NE(MustOpen("b").engine_pid, 0u);
  // The operator gives it up.
  fs::remove_all(folder);
  EXPECT_NE(MustOpen("a").engine_pid, 0u);
}

TEST_F(SupervisorSleepTest, SleepingJobsCountAsJobs) {
  harness_.config().mutable_limits()->set_jobs_max(1);
  harness_.Start();
  MakeJob("a");
  ASSERT_TRUE(Sleep("a").ok());
  EXPECT_TRUE(absl::IsResourceExhausted(harness_.Open("b").status()));
}

}  // namespace
}  // namespace optstate::supervisor
