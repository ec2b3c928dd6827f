// Tests a job's directory and its file system, and the messages about a FAILED
// job.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/supervisor/supervisor_harness.h"
#include "storage/testing/test_mounts.h"

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Harness = SupervisorHarness;

class SupervisorFilesTest : public testing::Test {
 protected:
  // Opens a session; returns the pid of its engine.
  pid_t MustOpen(const std::string& job) {
    const auto session = harness_.Open(job);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? static_cast<pid_t>(session->engine_pid) : 0;
  }

  Harness harness_;
};

// The state was removed by a cleanup of /dev/shm.
TEST_F(SupervisorFilesTest, StateThatWasRemovedIsNotSaidToBeKept) {
  harness_.Start();
  Supervisor& supervisor = harness_.supervisor();
  const pid_t engine = MustOpen("a");
  const std::string directory = harness_.JobDirectory("a");
  ASSERT_TRUE(std::filesystem::create_directory(directory + "/state"));
  const std::string aside = harness_.config().state_dir() + "/aside";
  std::filesystem::rename(directory, aside);
  ASSERT_EQ(::kill(engine, SIGKILL), 0);
  ASSERT_TRUE(
      Harness::Eventually([this] { return harness_.Find("a")->failed; }));
  EXPECT_EQ(harness_.Find("a")->restarts, 0u) << "nothing could be started";
  const auto says_so = AllOf(
      HasSubstr("killed by signal 9"), HasSubstr(directory + " was removed"),
      HasSubstr("nothing is left to recover"),
      HasSubstr("`optctl delete job a`"), Not(HasSubstr("kept")),
      Not(HasSubstr("optctl recover")));
  EXPECT_THAT(std::string(harness_.Open("a").status().message()), says_so);
  const absl::Status recovered = supervisor.RecoverJob(
      "a", access::UnixCaller(::geteuid()), 0, /*to_durable=*/false);
  EXPECT_TRUE(absl::IsFailedPrecondition(recovered)) << recovered;
  EXPECT_THAT(std::string(recovered.message()), says_so);
  // Restoring the directory restores the job.
  std::filesystem::rename(aside, directory);
  EXPECT_THAT(std::string(harness_.Open("a").status().message()),
              AllOf(HasSubstr("Its state is kept in " + directory),
                    HasSubstr("`optctl recover a` tries again")));
  ASSERT_TRUE(supervisor
                  .RecoverJob("a", access::UnixCaller(::geteuid()), 0,
                              /*to_durable=*/false)
                  .ok());
  const pid_t next = MustOpen("a");
  // A job whose files are gone can be deleted.
  std::filesystem::remove_all(harness_.config().state_dir() + "/jobs");
  ASSERT_EQ(::kill(next, SIGKILL), 0);
  ASSERT_TRUE(
      Harness::Eventually([this] { return harness_.Find("a")->failed; }));
  ASSERT_TRUE(supervisor.HoldJob("a", access::UnixCaller(::geteuid())).ok());
  const absl::Status deleted =
      supervisor.DeleteHeldJob("a", absl::Now() + Harness::kPatience);
  EXPECT_TRUE(deleted.ok()) << deleted;
  EXPECT_FALSE(harness_.Find("a").has_value());
}

TEST_F(SupervisorFilesTest, JobWithoutStateThatFailsHasNothingToKeep) {
  harness_.config().mutable_engine()->set_restarts_max(0);
  harness_.Start();
  EXPECT_THAT(std::string(harness_.Open("dies-at-start").status().message()),
              AllOf(HasSubstr("It has no state yet"),
                    HasSubstr("`optctl delete job dies-at-start`"),
                    Not(HasSubstr("state is kept"))));
}

// There are enough bytes. Whether the directory, the socket or a file of the
// engine does not fit: the answer names the exhausted resource and what to do.
TEST_F(SupervisorFilesTest, FileSystemWithoutInodesIsNamed) {
  // The root, jobs/, the daemon's socket and its lock take four inodes.
  for (const int inodes : {4, 5, 6, 7, 8}) {
    SCOPED_TRACE(inodes);
    const auto tmpfs = storage::TestTmpfs::Mount(
        harness_.config().state_dir(), absl::StrCat("nr_inodes=", inodes));
    if (absl::IsFailedPrecondition(tmpfs.status())) {
      GTEST_SKIP() << tmpfs.status();
    }
    ASSERT_TRUE(tmpfs.ok()) << tmpfs.status();
    harness_.Start();
    const absl::Status status = harness_.Open("gives-up").status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("tmpfs on " + harness_.config().state_dir()),
                      HasSubstr("out of inodes"), HasSubstr("nr_inodes="),
                      Not(HasSubstr("state is kept"))));
    EXPECT_TRUE(Harness::Eventually(
        [this] { return !harness_.Find("gives-up").has_value(); }));
    harness_.Stop();
  }
}

TEST_F(SupervisorFilesTest, StateIsKeptWhereInodesAreShort) {
  harness_.config().mutable_engine()->set_restarts_max(0);
  const auto tmpfs =
      storage::TestTmpfs::Mount(harness_.config().state_dir(), "nr_inodes=12");
  if (absl::IsFailedPrecondition(tmpfs.status())) {
    GTEST_SKIP() << tmpfs.status();
  }
  ASSERT_TRUE(tmpfs.ok()) << tmpfs.status();
  harness_.Start();
  const pid_t engine = MustOpen("a");
  ASSERT_TRUE(
      std::filesystem::create_directory(harness_.JobDirectory("a") + "/state"));
  ASSERT_EQ(::kill(engine, SIGKILL), 0);
  ASSERT_TRUE(
      Harness::Eventually([this] { return harness_.Find("a")->failed; }));
  EXPECT_THAT(std::string(harness_.Open("a").status().message()),
              AllOf(HasSubstr("out of inodes"), HasSubstr("nr_inodes="),
                    HasSubstr("Its state is kept in ")));
  harness_.Stop();
}

// Files that may be a job's only state are removed on request alone.
TEST_F(SupervisorFilesTest, AnEndByItselfKeepsDurableFiles) {
  const std::string disk = harness_.config().state_dir() + "/disk";
  const std::string folder = disk + "/jobs/one-session";
  harness_.config().mutable_nvme()->add_directories(disk);
  ASSERT_TRUE(std::filesystem::create_directory(disk));
  harness_.Start();
  {
    const auto session = harness_.Open("one-session");
    ASSERT_TRUE(session.ok()) << session.status();
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/durable").flush();
    std::ofstream(folder + "/owner") << ::geteuid();
  }
  ASSERT_TRUE(Harness::Eventually(
      [this] { return harness_.Find("one-session")->failed; }));
  EXPECT_TRUE(std::filesystem::exists(folder + "/durable"));
  EXPECT_THAT(std::string(harness_.Open("one-session").status().message()),
              AllOf(HasSubstr("ended by itself"),
                    HasSubstr("durable state is kept in " + folder)));
  Supervisor& supervisor = harness_.supervisor();
  ASSERT_TRUE(
      supervisor.HoldJob("one-session", access::UnixCaller(::geteuid())).ok());
  const absl::Status deleted =
      supervisor.DeleteHeldJob("one-session", absl::Now() + Harness::kPatience);
  EXPECT_TRUE(deleted.ok()) << deleted;
  EXPECT_FALSE(std::filesystem::exists(folder));
}

}  // namespace
}  // namespace optstate::supervisor
