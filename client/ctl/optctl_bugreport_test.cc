// optctl bugreport, against a real daemon.

#include <sys/stat.h>

#include <csignal>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

class OptctlBugreportTest : public OptctlTest {
 protected:
  std::string File() const { return daemon_->directory() + "/report.tar.gz"; }
  Ran Report() const { return Optctl("bugreport --file " + File()); }
  // Returns a file of the archive, as tar extracts it.
  std::string Content(const std::string& name) const {
    const Ran ran = RunCommand(absl::StrCat(
        "tar -xzOf ", File(), " optstate-bugreport/", name, " 2>&1"));
    EXPECT_EQ(ran.exit_code, 0) << name << ": " << ran.output;
    return ran.output;
  }
};

TEST_F(OptctlBugreportTest, TheArchiveHasWhatTheListSays) {
  const auto session = Train("gpt");
  const Ran ran = Report();
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.output;
  for (const char* name :
       {"status.json", "jobs.json", "sessions.json", "tiers.json",
        "devices.json", "users.json", "events.jsonl", "daemon/limits",
        "machine/meminfo"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, absl::StrCat("  ", name, "\n")))
        << ran.output;
    EXPECT_NE(Content(name), "") << name;
  }
  EXPECT_TRUE(absl::StrContains(Content("jobs.json"), "\"name\": \"gpt\""));
  EXPECT_TRUE(absl::StrContains(Content("sessions.json"), "\"job\": \"gpt\""));
  EXPECT_TRUE(absl::StrContains(Content("events.jsonl"), "job_created"));
  EXPECT_TRUE(absl::StrContains(ran.output, Content("contents.txt")))
      << ran.output;
  struct stat info;
  ASSERT_EQ(::stat(File().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

// stdout may be the archive, so that progress is on stderr.
TEST_F(OptctlBugreportTest, ProgressIsOnStderr) {
  const Ran said =
      RunBinary(AtDaemon("bugreport --file " + File()), "2>&1 >/dev/null");
  EXPECT_EQ(said.exit_code, kExitOk) << said.output;
  EXPECT_TRUE(absl::StartsWith(
      said.output, "bug report: status.json, 1 of 12 parts, 0 B so far\n"))
      << said.output;
}

// The daemon's own counters are nowhere else.
TEST_F(OptctlBugreportTest, TheMetricsOfADaemonThatServesThem) {
  const Ran without = Report();
  ASSERT_EQ(without.exit_code, kExitOk) << without.output;
  EXPECT_TRUE(absl::StrContains(without.output,
                                "metrics.txt: the daemon serves "
                                "none"))
      << without.output;
  const std::string socket = daemon_->directory() + "/metrics.sock";
  auto serving = TestDaemon::Start(
      {.flags = {},
       .config = absl::StrCat("metrics:\n  address: \"unix:", socket, "\"\n")});
  ASSERT_TRUE(serving.ok()) << serving.status();
  const auto first = std::exchange(daemon_, *std::move(serving));
  const auto session = Train("gpt");
  const Ran with = Report();
  ASSERT_EQ(with.exit_code, kExitOk) << with.output;
  EXPECT_TRUE(absl::StrContains(with.output, "  metrics.txt\n")) << with.output;
  EXPECT_TRUE(absl::StrContains(Content("metrics.txt"), "job_name=\"gpt\""));
}

TEST_F(OptctlBugreportTest, AFileThatIsThereStays) {
  ASSERT_EQ(Report().exit_code, kExitOk);
  const Ran again = Report();
  EXPECT_EQ(again.exit_code, kExitRefused) << again.output;
  EXPECT_TRUE(absl::StrContains(again.output, "is not written over"))
      << again.output;
  EXPECT_NE(Content("status.json"), "");
}

// A report is needed most when the daemon is dead.
TEST_F(OptctlBugreportTest, ADaemonThatDoesNotAnswer) {
  daemon_->process().Signal(SIGSTOP);
  const Ran ran =
      Optctl(absl::StrCat("--timeout 0.5 bugreport --file ", File()));
  daemon_->process().Signal(SIGCONT);
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "jobs.json: see status.json"))
      << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "The daemon is stopped"))
      << ran.output;
  EXPECT_NE(Content("machine/meminfo"), "");
}

TEST_F(OptctlBugreportTest, StdoutIsAFileToo) {
  const Ran ran = RunBinary(
      AtDaemon("bugreport --file -"),
      absl::StrCat("2>/dev/null > ", File(), " && tar -tzf ", File()));
  EXPECT_EQ(ran.exit_code, kExitOk);
  EXPECT_TRUE(absl::StrContains(ran.output, "optstate-bugreport/contents.txt"))
      << ran.output;
  const Ran full = OptctlToFull("bugreport --file -");
  EXPECT_EQ(full.exit_code, kExitOther) << full.output;
}

TEST_F(OptctlBugreportTest, WhatIsBadUsage) {
  EXPECT_EQ(Optctl("bugreport -o json").exit_code, kExitUsage);
  EXPECT_EQ(Optctl("bugreport --file /nonexistent/x.tar.gz").exit_code,
            kExitNotFound);
}

}  // namespace
}  // namespace optstate::ctl
