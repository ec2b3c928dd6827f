// optctl set, against a real daemon with a job on a real disk; and what optctl
// says of memory that is locked.

#include <stdlib.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

class OptctlSetTest : public OptctlTest {
 protected:
  void SetUp() override { StartDaemon("auto"); }
  void TearDown() override {
    daemon_ = nullptr;
    std::filesystem::remove_all(disk_);
  }

  void StartDaemon(const std::string& lock_memory) {
    disk_ = testing::TempDir() + "/optctl_set-XXXXXX";
    ASSERT_NE(::mkdtemp(disk_.data()), nullptr);
    TestDaemon::Options options;
    options.flags = {"--nvme-dir=" + disk_, "--lock-memory=" + lock_memory};
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  std::unique_ptr<client::Session> TrainOnDisk() {
    client::StorageOptions storage;
    storage.placement = client::Placement::kNvme;
    storage.durability = client::Durability::kStep;
    return Train("gpt", storage);
  }
  void ExpectDescribed(const std::string& text) const {
    const Ran ran = Optctl("describe job gpt");
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }

  std::string disk_;
};

TEST_F(OptctlSetTest, SettingsAreInForceAtOnceAndInTheNextEngine) {
  const auto session = TrainOnDisk();
  const Ran ran = Optctl("set job gpt host_budget=2MiB 'durability=every 9'");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  for (const char* text :
       {"job gpt: host_budget 2.0 MiB, which is 1 of 1 records of up to ",
        " in memory at once; durability: every 9 steps\n"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
  ExpectDescribed("2.0 MiB");
  ExpectDescribed("every 9 steps");
  ASSERT_TRUE(Step(*session, 2).ok());
  ASSERT_TRUE(daemon_->KillEngine("gpt").ok());
  ASSERT_TRUE(Step(*session, 3).ok());
  ExpectDescribed("every 9 steps");
  const auto job = daemon_->GetJob("gpt");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->storage().host_budget_bytes(), 2 << 20);
  EXPECT_EQ(job->disk().durable_step(), 1);
}

TEST_F(OptctlSetTest, WhatCannotBeSetIsRefusedWithWhatToDo) {
  const auto session = TrainOnDisk();
  const auto in_memory = Train("host");
  const struct {
    const char* arguments;
    int exit_code;
    const char* says;
  } asked[] = {
      {"gpt host_budget=1KiB", kExitUsage, "it must hold 3: set at least "},
      {"gpt host_budget=plenty", kExitUsage, "such as 64MiB"},
      {"gpt durability=none", kExitRefused, "but not \"none\""},
      {"gpt directory_weights=1,1", kExitUsage, "2 weights for 1 directories"},
      {"gpt directory_weights=1,x", kExitUsage, "such as 3,1"},
      {"gpt directory_weights=1 durability=step", kExitUsage, "is set alone"},
      {"host directory_weights=1", kExitRefused, "lies in memory alone"},
      {"gpt placement=host", kExitUsage, "sets nothing that a job has"},
      {"gpt", kExitUsage, "settings"},
      {"host host_budget=8MiB", kExitRefused, "placement=\"nvme\""},
      {"host device_budget=plenty", kExitUsage, "such as 64MiB"},
      {"host device_budget=8MiB", kExitUsage, "offload_fraction below 1"},
      {"gpt device_budget=8MiB", kExitUsage, "offload_fraction below 1"},
      {"absent host_budget=8MiB", kExitNotFound, "there is no job"},
  };
  for (const auto& [arguments, exit_code, says] : asked) {
    const Ran ran = Optctl(absl::StrCat("set job ", arguments));
    EXPECT_EQ(ran.exit_code, exit_code) << arguments << ": " << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, says)) << ran.output;
  }
}

// It says that it waits, and gives up at the timeout.
TEST_F(OptctlSetTest, ASettingThatAnEngineDoesNotTakeIsShown) {
  const auto session = TrainOnDisk();
  const Process engine = StopEngine("gpt");
  const std::string set = "--timeout 4 set job gpt host_budget=2MiB";
  const Ran ran = Optctl(set);
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  EXPECT_TRUE(
      absl::StrContains(ran.output, "setting job gpt: waits for its engine, "))
      << ran.output;
  // A program that reads the message has no lines of progress.
  const Ran json = Optctl(absl::StrCat(set, " -o json"));
  EXPECT_EQ(json.exit_code, kExitUnreachable) << json.output;
  EXPECT_FALSE(absl::StrContains(json.output, "setting job")) << json.output;
  engine.Signal(SIGCONT);
}

TEST_F(OptctlSetTest, StatusAndDescribeSayWhatIsLocked) {
  daemon_ = nullptr;
  ASSERT_NO_FATAL_FAILURE(StartDaemon("never"));
  const auto session = TrainOnDisk();
  for (const char* arguments : {"status", "describe job gpt"}) {
    const Ran ran = Optctl(arguments);
    EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, " not: lock_memory: never"))
        << ran.output;
  }
}

}  // namespace
}  // namespace optstate::ctl
