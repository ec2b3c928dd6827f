#include "client/endpoint/embedded.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/client.h"
#include "client/endpoint/embedded_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/rank_process.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

constexpr char kDaemon[] = "server/optstated";

SessionOptions Embedded(LayoutSpec layout) {
  SessionOptions options = NewJob(std::move(layout));
  options.endpoint = "embedded";
  options.daemon_path = kDaemon;
  return options;
}

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

// Makes an executable that runs `script`.
std::string MakeProgram(const std::string& name, const std::string& script) {
  std::string path = absl::StrCat(testing::TempDir(), "/", name);
  std::ofstream(path) << "#!/bin/sh\n" << script << "\n";
  chmod(path.c_str(), 0755);
  return path;
}

// The first two tests come before a daemon runs, because that daemon would be
// used.
TEST(EmbeddedTest, EarlyEndIsToldWithItsWords) {
  const std::string program =
      MakeProgram("broken", "echo 'no room on the moon' >&2; exit 3");
  const auto socket = EmbeddedDaemonSocket(program, Soon());
  EXPECT_EQ(socket.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(socket.status().message(), HasSubstr("no room on the moon"));
}

TEST(EmbeddedTest, BinaryThatIsNotThereIsNamed) {
  const auto socket = EmbeddedDaemonSocket("/nonexistent/optstated", Soon());
  EXPECT_EQ(socket.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(socket.status().message(), HasSubstr("/nonexistent/optstated"));
}

TEST(EmbeddedTest, SessionsOfAProcessShareOneDaemon) {
  auto first = Session::Open(Embedded(UniformLayout(2, 10)));
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = Session::Open(Embedded(UniformLayout(2, 10)));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ((*first)->info().endpoint, (*second)->info().endpoint);
  EXPECT_THAT((*first)->info().endpoint, HasSubstr("unix:/"));
  for (auto* session : {first->get(), second->get()}) {
    ASSERT_TRUE(LoadConstant(*session, 1).ok());
    ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
    const auto outcome = session->Commit(CommitOf(*session, 1));
    ASSERT_TRUE(outcome.ok()) << outcome.status();
  }
  // Another rank of the node opens a session in the same way.
  SessionOptions options = NewJob(UniformLayout(1, 1));
  options.endpoint = (*first)->info().endpoint;
  EXPECT_TRUE(Session::Open(options).ok());
}

TEST(EmbeddedTest, ForkedChildStartsItsOwn) {
  const auto ours = EmbeddedDaemonSocket(kDaemon, Soon());
  ASSERT_TRUE(ours.ok()) << ours.status();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto theirs = EmbeddedDaemonSocket(kDaemon, Soon());
    const bool good = theirs.ok() && *theirs != *ours;
    _exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  // The child's end did not end this process's daemon.
  EXPECT_EQ(*EmbeddedDaemonSocket(kDaemon, Soon()), *ours);
}

TEST(EmbeddedTest, EndsWithItsProcessAndLeavesNothingBehind) {
  auto rank = RankProcess::Start({.endpoint = "embedded",
                                  .daemon_path = kDaemon,
                                  .job = "job",
                                  .rank = 0,
                                  .world_size = 1,
                                  .seed = 1});
  ASSERT_TRUE(rank.ok()) << rank.status();
  ASSERT_TRUE((*rank)->Do("load").ok());
  ASSERT_TRUE((*rank)->Do("step 1").ok());
  const auto endpoint = (*rank)->Do("info");
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  const std::string socket(absl::StripPrefix(*endpoint, "unix:"));
  const auto pid = TestDaemon::PidAt(socket);
  ASSERT_TRUE(pid.ok()) << pid.status();
  const Process daemon(*pid);
  EXPECT_TRUE(daemon.running());
  ASSERT_TRUE((*rank)->Kill().ok());
  EXPECT_TRUE(daemon.AwaitEnd(Soon()).ok());
  EXPECT_FALSE(
      std::filesystem::exists(std::filesystem::path(socket).parent_path()));
}

// The daemon is killed, then its trainer: the daemon leaves the directory to
// the trainer, the trainer to the next process that starts an embedded daemon.
TEST(EmbeddedTest, WhatTheKilledLeftIsRemoved) {
  auto rank = RankProcess::Start({.endpoint = "embedded",
                                  .daemon_path = kDaemon,
                                  .job = "job",
                                  .rank = 0,
                                  .world_size = 1,
                                  .seed = 1});
  ASSERT_TRUE(rank.ok()) << rank.status();
  ASSERT_TRUE((*rank)->Do("load").ok());
  const auto endpoint = (*rank)->Do("info");
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  const std::string socket(absl::StripPrefix(*endpoint, "unix:"));
  const std::filesystem::path directory =
      std::filesystem::path(socket).parent_path();
  const auto pid = TestDaemon::PidAt(socket);
  ASSERT_TRUE(pid.ok()) << pid.status();
  const Process daemon(*pid);
  RemoveAbandonedDirectories();
  EXPECT_TRUE(std::filesystem::exists(socket)) << "of a daemon that runs";
  daemon.Signal(SIGKILL);
  ASSERT_TRUE(daemon.AwaitEnd(Soon()).ok());
  RemoveAbandonedDirectories();
  EXPECT_TRUE(std::filesystem::exists(directory)) << "of a trainer that lives";
  ASSERT_TRUE((*rank)->Kill().ok());
  // An engine that is still ending keeps the directory, too.
  const absl::Time deadline = Soon();
  while (std::filesystem::exists(directory) && absl::Now() < deadline) {
    RemoveAbandonedDirectories();
  }
  EXPECT_FALSE(std::filesystem::exists(directory));
}

TEST(EmbeddedTest, DirectoriesInUseAreLeftAlone) {
  auto mine = MakeEmbeddedDirectory();
  ASSERT_TRUE(mine.ok()) << mine.status();
  std::string being_made =
      mine->path.substr(0, mine->path.size() - 6) + "XXXXXX";
  ASSERT_NE(mkdtemp(being_made.data()), nullptr);
  RemoveAbandonedDirectories();
  EXPECT_TRUE(std::filesystem::exists(mine->path));
  EXPECT_TRUE(std::filesystem::exists(being_made));
  rmdir(being_made.c_str());
  mine->owner_lock.reset();
  RemoveAbandonedDirectories();
  EXPECT_FALSE(std::filesystem::exists(mine->path));
}

}  // namespace
}  // namespace optstate::client
