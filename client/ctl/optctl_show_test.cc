// Tests what optctl shows of a daemon and its jobs.

#include <csignal>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

using OptctlShowTest = OptctlTest;

TEST_F(OptctlShowTest, JsonIsTheReplyMessage) {
  const auto session = Train("gpt");
  const Ran ran = Optctl("describe job gpt -o json");
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.output;
  v1::Job job;
  ASSERT_TRUE(
      google::protobuf::util::JsonStringToMessage(ran.output, &job).ok())
      << ran.output;
  EXPECT_EQ(job.name(), "gpt");
  EXPECT_EQ(job.committed_step(), 1u);
  EXPECT_EQ(job.element_count(), 9u);
  EXPECT_EQ(job.sessions_size(), 1);
}

// A request for values from a hanging engine fails, and no number is made up
// for them.
TEST_F(OptctlShowTest, WhatAStoppedEngineDoesNotSayIsUnknown) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const struct {
    const char* arguments;
    const char* says;
  } asked[] = {
      {"get jobs", "gpt  ?        1   ?/1      2        9 160.0 KiB adamw"},
      {"get sessions", "gave no answer: job gpt (engine of job \"gpt\": "},
      {"get sessions --job gpt -o json", "\"sessions\": []"},
      {"status", "? (0 without 1 jobs that gave no answer)"},
      {"status -o json", "\"unanswered\": [\n  {\n   \"name\": \"gpt\""},
      {"describe job gpt", "? of 1 attached"},
  };
  for (const auto& [arguments, says] : asked) {
    const Ran ran = Optctl(absl::StrCat("--timeout 1 ", arguments));
    EXPECT_EQ(ran.exit_code, kExitUnreachable) << arguments;
    for (const char* text : {says, "optctl: not all is known"}) {
      EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
    }
    EXPECT_FALSE(absl::StrContains(ran.output, "none found")) << ran.output;
  }
  engine.Signal(SIGCONT);
  EXPECT_EQ(Optctl("get jobs").exit_code, kExitOk);
}

TEST_F(OptctlShowTest, DescribeTellsWhereTimeAndMemoryGo) {
  const auto session = Train("gpt");
  ASSERT_TRUE(Step(*session, 2).ok());
  const Ran json = Optctl("describe job gpt -o json");
  v1::Job job;
  ASSERT_TRUE(
      google::protobuf::util::JsonStringToMessage(json.output, &job).ok())
      << json.output;
  EXPECT_EQ(job.last_step_times().steps(), 1u);
  EXPECT_EQ(job.mean_step_times().steps(), 2u);
  for (const v1::StepTimes* times :
       {&job.last_step_times(), &job.mean_step_times()}) {
    EXPECT_GT(times->staging_ns(), 0u);
    EXPECT_GT(times->decide_ns(), 0u);
    EXPECT_GT(times->update_ns(), 0u);
    EXPECT_GT(times->publish_ns(), 0u);
    // AdamW in fp32: the gradient once, the parameter and two arrays twice.
    EXPECT_EQ(times->update_bytes(), 9u * (4 + 3 * 8));
  }
  int told = 0;
  for (const v1::ArrayBytes& array : job.arrays()) {
    if (array.name() != "parameters" && array.name() != "exp_avg") continue;
    ++told;
    ASSERT_GT(array.pages_size(), 0) << array.name();
    EXPECT_GE(array.pages(0).page_bytes(), 4096u);
    EXPECT_GT(array.pages(0).bytes(), 0u);
    EXPECT_GT(array.nodes_size(), 0) << array.name();
  }
  EXPECT_EQ(told, 2);

  const std::string table = Optctl("describe job gpt").output;
  for (const char* row :
       {"mean of 2", "  staging", "  waiting for ranks", "  norm and decision",
        "  update", "  publish", "252 B moved",
        " pages, node 0: ", "72 B of gradients, "}) {
    EXPECT_TRUE(absl::StrContains(table, row)) << row << " in\n" << table;
  }
}

TEST_F(OptctlShowTest, TopShowsRatesOfWhatJobsDo) {
  const auto session = Train("gpt");
  const Ran once = Optctl("top --count 1");
  EXPECT_EQ(once.exit_code, kExitOk) << once.output;
  EXPECT_TRUE(absl::StrContains(once.output, "STEPS/S")) << once.output;
  // The job takes no step between the two looks.
  const Ran twice = Optctl("top --count 2 --interval 0.1 -o wide");
  EXPECT_EQ(twice.exit_code, kExitOk) << twice.output;
  EXPECT_TRUE(absl::StrContains(twice.output, " 0.00 ")) << twice.output;
  EXPECT_TRUE(absl::StrContains(twice.output, "OPEN STEP")) << twice.output;
  for (const char* wrong : {"top --interval 0", "top -o json"}) {
    EXPECT_EQ(Optctl(wrong).exit_code, kExitUsage) << wrong;
  }
}

// The first table is there before the signal.
TEST_F(OptctlShowTest, ASignalEndsTop) {
  const Ran ran = RunCommand(absl::StrCat(
      "fifo=$(mktemp -u) && mkfifo \"$fifo\" && { ", "client/ctl/optctl ",
      AtDaemon("top --interval 3600"),
      " >\"$fifo\" & read -r line <\"$fifo\"; kill -TERM $!; wait $!; ",
      "code=$?; rm \"$fifo\"; exit $code; }"));
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
}

TEST_F(OptctlShowTest, DescribeComparesTheUpdateWithTheMemory) {
  const std::string record = daemon_->state_dir() + "/memory_bandwidth";
  std::ofstream(record) << "1 1000000000\n";
  const auto session = Train("gpt");
  const Ran json = Optctl("describe job gpt -o json");
  v1::Job job;
  ASSERT_TRUE(
      google::protobuf::util::JsonStringToMessage(json.output, &job).ok())
      << json.output;
  EXPECT_GT(job.memory_bytes_per_s(), 0);
  const v1::StepTimes& last = job.last_step_times();
  EXPECT_NEAR(last.memory_share() * job.memory_bytes_per_s(),
              static_cast<double>(last.update_bytes()) * 1e9 /
                  static_cast<double>(last.update_ns()),
              1);
  EXPECT_TRUE(absl::StrContains(Optctl("describe job gpt").output, "GB/s"));
}

TEST_F(OptctlShowTest, TablesNameWhatIsThere) {
  EXPECT_EQ(Optctl("get jobs").output, "none found\n");
  const auto session = Train("gpt");
  EXPECT_TRUE(absl::StrContains(Optctl("get jobs").output, "gpt"));
  EXPECT_TRUE(absl::StrContains(Optctl("get sessions").output, "shm"));
  const Ran params = Optctl("get params gpt -o wide");
  EXPECT_EQ(params.exit_code, kExitOk);
  EXPECT_TRUE(absl::StrContains(params.output, "weight")) << params.output;
  EXPECT_TRUE(absl::StrContains(params.output, "[2,3]")) << params.output;
  EXPECT_TRUE(absl::StrContains(Optctl("status").output, daemon_->directory()));
  EXPECT_TRUE(absl::StrContains(Optctl("version").output, "optstated"));
}

}  // namespace
}  // namespace optstate::ctl
