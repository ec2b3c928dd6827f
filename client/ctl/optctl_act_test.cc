// Tests what optctl makes a daemon do.

#include <signal.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using OptctlActTest = OptctlTest;

// The daemon gives up before optctl does, so its message arrives.
TEST_F(OptctlActTest, WhatWaitsForAStoppedEngineIsSaidInTime) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const struct {
    const char* arguments;
    const char* says;
    int exit_code;
  } asked[] = {
      {"--timeout 3 get params gpt", "engine of job \"gpt\": Deadline Exceeded",
       kExitUnreachable},
      // The daemon waits 2 s for the engine, and is silent meanwhile.
      {"--timeout 30 delete job gpt", "does not say whether ranks are attached",
       kExitRefused},
      {"--timeout 30 recover gpt", "has not failed", kExitRefused},
      {"--timeout 3 upgrade", "the upgrade has begun", kExitUnreachable},
  };
  for (const auto& [arguments, says, exit_code] : asked) {
    const Ran ran = Optctl(arguments);
    EXPECT_EQ(ran.exit_code, exit_code) << arguments << ": " << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, says)) << ran.output;
  }
  engine.Signal(SIGCONT);
}

// It says what it waits for until the job is gone, however long that takes.
TEST_F(OptctlActTest, ADeletionIsShownUntilTheJobIsGone) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const std::string said = daemon_->directory() + "/said";
  Ran ran;
  std::thread optctl([&] {
    ran = RunBinary(AtDaemon("delete job gpt --force"),
                    absl::StrCat("> ", said, " 2>&1"));
  });
  const auto read = [&said] {
    std::ifstream file(said);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  while (!absl::StrContains(read(), "waits for the end of its engine\n")) {
    std::this_thread::yield();
  }
  EXPECT_EQ(Optctl("delete job gpt --force").exit_code, kExitUnreachable);
  engine.Signal(SIGCONT);
  optctl.join();
  EXPECT_EQ(ran.exit_code, kExitOk) << read();
  EXPECT_TRUE(absl::EndsWith(read(), "job gpt deleted\n")) << read();
  EXPECT_EQ(Optctl("describe job gpt").exit_code, kExitNotFound);
}

// The daemon goes on without it.
TEST_F(OptctlActTest, CtrlCEndsOptctlAndNotTheDeletion) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const std::string said = daemon_->directory() + "/said";
  const std::string pid_file = daemon_->directory() + "/pid";
  Ran ran;
  std::thread optctl([&] {
    ran = RunCommand(
        absl::StrCat("client/ctl/optctl ", AtDaemon("delete job gpt --force"),
                     " > ", said, " 2>&1 & echo $! > ", pid_file, "; wait $!"));
  });
  const auto read = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  while (!absl::StrContains(read(said), "waits for the end of its engine\n") ||
         !absl::StrContains(read(pid_file), "\n")) {
    std::this_thread::yield();
  }
  ::kill(static_cast<pid_t>(std::stol(read(pid_file))), SIGINT);
  optctl.join();
  EXPECT_EQ(ran.exit_code, kExitCancelled) << read(said);
  EXPECT_TRUE(absl::StrContains(read(said), "the daemon goes on"))
      << read(said);
  engine.Signal(SIGCONT);
  while (Optctl("describe job gpt").exit_code != kExitNotFound) {
  }
}

TEST_F(OptctlActTest, DeleteIsRefusedWhileRanksAreAttached) {
  auto session = Train("gpt");
  EXPECT_EQ(Optctl("delete job gpt").exit_code, kExitRefused);
  session->Close();
  EXPECT_EQ(Optctl("delete job gpt").exit_code, kExitOk);
  EXPECT_EQ(Optctl("describe job gpt").exit_code, kExitNotFound);
}

TEST_F(OptctlActTest, ForcedDeleteEndsTheSession) {
  const auto session = Train("gpt");
  EXPECT_EQ(Optctl("delete job gpt --force").exit_code, kExitOk);
  EXPECT_EQ(Optctl("describe job gpt").exit_code, kExitNotFound);
}

TEST_F(OptctlActTest, OnlyAFailedJobIsRecovered) {
  const auto session = Train("gpt");
  const Ran ran = Optctl("recover gpt");
  EXPECT_EQ(ran.exit_code, kExitRefused);
  EXPECT_TRUE(absl::StrContains(ran.output, "has not failed")) << ran.output;
  EXPECT_EQ(Optctl("recover absent").exit_code, kExitNotFound);
  EXPECT_EQ(Optctl("recover").exit_code, kExitUsage);
}

// The operator sees why the job's engine cannot stay, and recovers the job.
TEST_F(OptctlActTest, FailedJobIsDescribedAndRecovered) {
  const auto session = Train("gpt");
  Ran ran;
  // The job becomes FAILED at the sixth death within a minute.
  while (!absl::StrContains(ran.output, "failed")) {
    ASSERT_TRUE(daemon_->KillEngine("gpt").ok());
    ran = Optctl("describe job gpt");
    ASSERT_EQ(ran.exit_code, kExitOk) << ran.output;
  }
  // Files provide the values that no engine reports any more.
  for (const std::string text :
       {"killed by signal 9", "5 restart(s)", "/state/jobs/gpt",
        "committed step     1\n", "2 parameters, 9 elements",
        "0 of 1 attached"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
  ran = Optctl("--timeout 60 recover gpt");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(
      ran.output,
      "job gpt: its engine runs again, phase ready, committed step 1\n"))
      << ran.output;
  const auto outcome = Step(*session, 2);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
}

// The job's engine runs to report the reason; the next engine finds the
// repaired file.
TEST_F(OptctlActTest, JobThatCouldNotBeOpenedIsRecovered) {
  const auto session = Train("gpt");
  const std::string control =
      absl::StrCat(daemon_->state_dir(), "/jobs/gpt/state/control");
  std::filesystem::rename(control, control + ".away");
  ASSERT_TRUE(daemon_->KillEngine("gpt").ok());
  const int64_t first = AwaitFailedEngine("gpt", /*last=*/0);
  const Ran too_early = Optctl("--timeout 60 recover gpt");
  ASSERT_EQ(too_early.exit_code, kExitRefused) << too_early.output;
  EXPECT_TRUE(absl::StrContains(too_early.output, "is FAILED as before: "))
      << too_early.output;
  AwaitFailedEngine("gpt", first);

  std::filesystem::rename(control + ".away", control);
  const Ran ran = Optctl("recover gpt");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  const auto outcome = Step(*session, 2);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(Optctl("recover gpt").exit_code, kExitRefused);
}

// Another build replaces the daemon, and the rank only waits.
TEST_F(OptctlActTest, UpgradeWhileARankSteps) {
  const auto session = Train("gpt");
  const std::string binary = absl::StrCat(daemon_->directory(), "/next");
  std::filesystem::copy_file("server/optstated", binary);
  std::atomic<uint64_t> taken{1};
  std::atomic<bool> enough{false};
  std::thread rank([&] {
    while (!enough) {
      const auto outcome = Step(*session, taken + 1);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ++taken;
    }
  });
  const Ran ran =
      Optctl(absl::StrCat("upgrade --timeout 60 --binary ", binary));
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output << daemon_->Log();
  EXPECT_TRUE(absl::StrContains(ran.output, "upgrading to 0.")) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "engines replaced 1"))
      << ran.output;
  const uint64_t before = taken;
  while (taken < before + 3) std::this_thread::yield();
  enough = true;
  rank.join();
  const auto job = daemon_->GetJob("gpt");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->committed_step(), taken);
  EXPECT_EQ(std::filesystem::read_symlink(
                absl::StrCat("/proc/", job->engine_pid(), "/exe")),
            binary);
}

TEST_F(OptctlActTest, UpgradeOfWhichNothingCanBeSaid) {
  const std::string binary = absl::StrCat(daemon_->directory(), "/next");
  std::filesystem::copy_file("server/optstated", binary);
  const Ran ran =
      OptctlToFull(absl::StrCat("upgrade --timeout 60 --binary ", binary));
  EXPECT_EQ(ran.exit_code, kExitOther) << ran.output;
  const auto status = daemon_->GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_TRUE(status->upgrade().done());
  EXPECT_EQ(status->upgrade().problems_size(), 0);
}

TEST_F(OptctlActTest, UpgradeThatCannotBe) {
  EXPECT_EQ(Optctl("upgrade --binary /nonexistent").exit_code, kExitNotFound);
  const Ran ran = Optctl("upgrade --binary /bin/true");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "no optstated")) << ran.output;
}

TEST_F(OptctlActTest, DrainRefusesNewSessionsUntilResumed) {
  ASSERT_NE(Train("first"), nullptr);
  const Ran drained = Optctl("drain");
  ASSERT_EQ(drained.exit_code, kExitOk);
  EXPECT_TRUE(absl::StrContains(drained.output, "waits for open steps, "))
      << drained.output;
  // A program that reads the message has nothing before it.
  const Ran again = Optctl("drain -o json");
  EXPECT_EQ(again.exit_code, kExitOk);
  EXPECT_EQ(again.output.substr(0, 1), "{") << again.output;
  EXPECT_TRUE(
      absl::StrContains(Optctl("status -o yaml").output, "draining: true"));
  client::SessionOptions options;
  options.endpoint = daemon_->shm_endpoint();
  options.job = "second";
  options.layout.groups.resize(1);
  options.layout.parameters = {{"weight", {1}, 1}};
  EXPECT_EQ(client::Session::Open(options).status().code(),
            absl::StatusCode::kUnavailable);
  ASSERT_EQ(Optctl("drain --resume").exit_code, kExitOk);
  EXPECT_NE(Train("second"), nullptr);
}

TEST_F(OptctlActTest, ADrainNamesTheJobThatItWaitsFor) {
  const auto session = Train("gpt");
  const std::vector<float> ones(6, 1.0f);
  const void* const gradients[] = {ones.data(), ones.data()};
  ASSERT_TRUE(session->PushGradients(2, 0, {0, 1}, gradients).ok());
  const std::string said = daemon_->directory() + "/said";
  Ran ran;
  std::thread optctl([&] {
    ran = RunBinary(AtDaemon("--timeout 60 drain"),
                    absl::StrCat("> ", said, " 2>&1"));
  });
  const auto read = [&said] {
    std::ifstream file(said);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  while (!absl::StrContains(read(), "; 0 of 1 jobs have none; gpt: step 2: ")) {
    std::this_thread::yield();
  }
  client::CommitOptions commit;
  commit.step = 2;
  commit.groups.resize(1);
  EXPECT_TRUE(session->Commit(commit).ok());
  optctl.join();
  EXPECT_EQ(ran.exit_code, kExitOk) << read();
  EXPECT_TRUE(absl::StrContains(read(), "drained: no step is open")) << read();
}

// The daemon's own answer names the job, so it came before the timeout: optctl
// does not wait any longer for it than that.
TEST_F(OptctlActTest, DrainOfAStoppedEngineSaysWhatIsInForce) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const Ran drained = Optctl("--timeout 3 drain");
  EXPECT_EQ(drained.exit_code, kExitUnreachable) << drained.output;
  for (const char* text :
       {"draining: waits for open steps, ", "draining stays in force",
        "job \"gpt\"", "`optctl drain --resume`"}) {
    EXPECT_TRUE(absl::StrContains(drained.output, text)) << drained.output;
  }
  EXPECT_TRUE(
      absl::StrContains(Optctl("status -o yaml").output, "draining: true"));
  const Ran resumed = Optctl("--timeout 3 drain --resume");
  EXPECT_EQ(resumed.exit_code, kExitUnreachable) << resumed.output;
  for (const char* text : {"draining has ended", "job \"gpt\""}) {
    EXPECT_TRUE(absl::StrContains(resumed.output, text)) << resumed.output;
  }
  engine.Signal(SIGCONT);
  const Ran again = Optctl("drain --resume");
  EXPECT_EQ(again.exit_code, kExitOk) << again.output;
  EXPECT_TRUE(absl::StrContains(again.output, "it was not draining"))
      << again.output;
}

// Cut to whole seconds the wait would be 0.
TEST_F(OptctlActTest, DrainWaitsForAFractionOfASecond) {
  ASSERT_NE(Train("gpt"), nullptr);
  const Ran ran = Optctl("--timeout 0.99 drain");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
}

}  // namespace
}  // namespace optstate::ctl
