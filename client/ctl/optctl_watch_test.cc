// optctl watch, against a real daemon.

#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using OptctlWatchTest = OptctlTest;

TEST_F(OptctlWatchTest, AStepThatIsThereAlready) {
  const auto session = Train("gpt");
  const Ran ran = Optctl("watch job gpt --until committed_step=1");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(
      ran.output,
      "job gpt: phase ready, 1 of 1 ranks attached, committed step 1\n"))
      << ran.output;
  const Ran json = Optctl("watch job gpt --until committed_step=1 -o json");
  EXPECT_TRUE(absl::StrContains(json.output, "\"committed_step\":\"1\""))
      << json.output;
}

TEST_F(OptctlWatchTest, AStepIsAwaited) {
  const auto session = Train("gpt");
  Ran ran;
  std::thread watch([&] {
    ran = Optctl(
        "watch job gpt --interval 0.1 --steps-every 0.1 --until "
        "committed_step=3");
  });
  for (uint64_t step = 2; step <= 3; ++step) {
    const auto outcome = Step(*session, step);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
  }
  watch.join();
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "committed step 3\n"))
      << ran.output;
}

TEST_F(OptctlWatchTest, TheEndOfAJobIsAwaited) {
  Train("gpt")->Close();
  Ran ran;
  std::thread watch(
      [&] { ran = Optctl("watch job gpt --interval 0.1 --until deleted"); });
  EXPECT_EQ(Optctl("delete job gpt").exit_code, kExitOk);
  watch.join();
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
}

TEST_F(OptctlWatchTest, WhatCannotBeReached) {
  const Ran absent = Optctl("watch job absent --until committed_step=1");
  EXPECT_EQ(absent.exit_code, kExitNotFound) << absent.output;
  EXPECT_TRUE(absl::StrContains(absent.output, "there is no such job"))
      << absent.output;
  EXPECT_EQ(Optctl("watch job absent --until deleted").exit_code, kExitOk);
  for (const char* arguments :
       {"watch", "watch job", "watch job gpt --until soon",
        "watch job gpt --interval 0", "watch jobs --until deleted"}) {
    EXPECT_EQ(Optctl(arguments).exit_code, kExitUsage) << arguments;
  }
}

// A job that fails does not keep a script waiting.
TEST_F(OptctlWatchTest, AFailedJobIsNotAwaited) {
  const auto session = Train("gpt");
  Ran described;
  while (!absl::StrContains(described.output, "failed")) {
    ASSERT_TRUE(daemon_->KillEngine("gpt").ok());
    described = Optctl("describe job gpt");
  }
  const Ran ran = Optctl("watch job gpt --until committed_step=1000");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "the job is FAILED: "))
      << ran.output;
  EXPECT_EQ(Optctl("watch job gpt --until phase=FAILED").exit_code, kExitOk);
}

}  // namespace
}  // namespace optstate::ctl
