// optctl verify, against a real daemon with jobs on a real disk.

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

class OptctlVerifyTest : public OptctlTest {
 protected:
  void SetUp() override {
    disk_ = testing::TempDir() + "/optctl_verify-XXXXXX";
    ASSERT_NE(::mkdtemp(disk_.data()), nullptr);
    TestDaemon::Options options;
    options.flags = {"--nvme-dir=" + disk_};
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  void TearDown() override {
    daemon_ = nullptr;
    std::filesystem::remove_all(disk_);
  }

  std::unique_ptr<client::Session> TrainOnDisk() {
    client::StorageOptions storage;
    storage.placement = client::Placement::kNvme;
    storage.durability = client::Durability::kStep;
    return Train("gpt", storage);
  }
  std::string RecordsFile() const { return disk_ + "/jobs/gpt/records"; }
  // Damages a bit of both slots of the only record.
  void DamageRecord() {
    const auto job = daemon_->GetJob("gpt");
    ASSERT_TRUE(job.ok()) << job.status();
    ASSERT_EQ(job->disk().records(), 1u);
    const int fd = ::open(RecordsFile().c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0) << RecordsFile();
    for (uint64_t slot = 0; slot < 2; ++slot) {
      const auto at = static_cast<off_t>(slot * job->disk().frame_bytes());
      char byte = 0;
      ASSERT_EQ(::pread(fd, &byte, 1, at), 1);
      byte = static_cast<char>(byte ^ 1);
      ASSERT_EQ(::pwrite(fd, &byte, 1, at), 1);
    }
    ::close(fd);
  }
  // Runs optctl until the daemon has its call, then `act` with optctl's pid.
  template <typename Act>
  Ran VerifyUntil(Act act) {
    const std::string pid_file = disk_ + "/optctl_pid";
    Ran ran;
    std::thread optctl([&] {
      ran = RunCommand(absl::StrCat(
          "client/ctl/optctl ", AtDaemon("--timeout 600 verify gpt"),
          " 2>&1 & echo $! > ", pid_file, "; wait $!"));
    });
    while (!absl::StrContains(daemon_->Log(), "asked for")) {
      std::this_thread::yield();
    }
    pid_t pid = 0;
    while (pid == 0) std::ifstream(pid_file) >> pid;
    act(pid);
    optctl.join();
    return ran;
  }

  std::string disk_;
};

TEST_F(OptctlVerifyTest, AnUndamagedJobIsSaidToBeSo) {
  const auto session = TrainOnDisk();
  Ran ran = Optctl("verify gpt");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "job gpt: 1 records, "))
      << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "no damage\n")) << ran.output;
  ran = Optctl("verify gpt -o json");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  for (const char* text :
       {"\"records\": \"1\"", "\"damages\": []", "\"done\": true"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
  const auto outcome = Step(*session, 2);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
}

TEST_F(OptctlVerifyTest, ADamageIsNamed) {
  const auto session = TrainOnDisk();
  DamageRecord();
  Ran ran = Optctl("verify gpt");
  EXPECT_EQ(ran.exit_code, kExitDamaged) << ran.output;
  for (const std::string& text :
       {absl::StrCat("damaged: ", RecordsFile(), ", record of "),
        std::string(" at byte "),
        std::string("parameters \"weight\" to \"bias\": tile 0 differs"),
        std::string("1 DAMAGED"),
        std::string("optctl: job gpt: 1 of 1 records are damaged")}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
  ran = Optctl("verify gpt -o yaml");
  EXPECT_EQ(ran.exit_code, kExitDamaged) << ran.output;
  for (const std::string& text : {absl::StrCat("file: \"", RecordsFile(), "\""),
                                  std::string("kind: \"DAMAGE_KIND_STATE\""),
                                  std::string("first_parameter: \"weight\""),
                                  std::string("last_parameter: \"bias\"")}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
}

TEST_F(OptctlVerifyTest, WhatCannotBeVerified) {
  const auto session = Train("memory");
  const Ran ran = Optctl("verify memory");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "nothing on disk to verify"))
      << ran.output;
  EXPECT_EQ(Optctl("verify absent").exit_code, kExitNotFound);
  EXPECT_EQ(Optctl("verify").exit_code, kExitUsage);
}

TEST_F(OptctlVerifyTest, AStoppedEngineIsNotAwaitedForEver) {
  const auto session = TrainOnDisk();
  const Process engine = StopEngine("gpt");
  const Ran ran = Optctl("--timeout 1 verify gpt");
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "gave no answer within 1s"))
      << ran.output;
  engine.Signal(SIGCONT);
}

TEST_F(OptctlVerifyTest, CtrlCEndsIt) {
  const auto session = TrainOnDisk();
  const Process engine = StopEngine("gpt");
  const Ran ran = VerifyUntil([](pid_t optctl) { ::kill(optctl, SIGINT); });
  EXPECT_EQ(ran.exit_code, kExitCancelled) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "interrupted")) << ran.output;
  engine.Signal(SIGCONT);
  const Ran again = Optctl("verify gpt");
  EXPECT_EQ(again.exit_code, kExitOk) << again.output;
}

TEST_F(OptctlVerifyTest, TheEndOfTheEngineIsSaid) {
  const auto session = TrainOnDisk();
  StopEngine("gpt");
  const Ran ran = VerifyUntil([this](pid_t /*optctl*/) {
    EXPECT_TRUE(daemon_->KillEngine("gpt").ok());
  });
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "engine of job \"gpt\""))
      << ran.output;
  const auto outcome = Step(*session, 2);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  const Ran next = Optctl("verify gpt");
  EXPECT_EQ(next.exit_code, kExitOk) << next.output;
}

TEST_F(OptctlVerifyTest, DescribeCountsTheDirectories) {
  const auto session = TrainOnDisk();
  const auto outcome = Step(*session, 2);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  const Ran ran = Optctl("describe job gpt");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  for (const char* text :
       {"disk, last step", "CPU of I/O", "ms a GB", "errors, queue",
        "0 errors, 0 requests under way", " writes, ", "; updates waited ",
        "    disk wait", "/s while busy, "}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
}

TEST_F(OptctlVerifyTest, DescribeTellsOfTheLastVerification) {
  const auto session = TrainOnDisk();
  const auto expect = [this](const char* text) {
    const Ran ran = Optctl("describe job gpt");
    EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  };
  expect("not since the engine started");
  EXPECT_EQ(Optctl("verify gpt").exit_code, kExitOk);
  expect("Z, no damage; 0 scrubs");
  DamageRecord();
  EXPECT_EQ(Optctl("verify gpt").exit_code, kExitDamaged);
  expect(
      "Z, 1 DAMAGED records, named in the log and by `optctl verify gpt`; 0 "
      "scrubs");
}

}  // namespace
}  // namespace optstate::ctl
