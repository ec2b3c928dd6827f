// Limits of the configuration, and what the machine lacks: fds, room in a
// socket.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/unique_fd.h"
#include "server/os/open_sockets.h"
#include "server/supervisor/job_host.h"
#include "server/supervisor/supervisor_fixture.h"
#include "server/supervisor/supervisor_harness.h"

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Harness = SupervisorHarness;
using SupervisorLimitsTest = SupervisorTest;

TEST_F(SupervisorLimitsTest, JobLimit) {
  harness_.config().mutable_limits()->set_jobs_max(1);
  harness_.Start();
  const TestSession a = MustOpen("a");
  const absl::Status status = harness_.Open("b").status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("limits.jobs_max"));
  MustOpen("a");
}

TEST_F(SupervisorLimitsTest, SessionLimitFreesEndedSessions) {
  harness_.config().mutable_limits()->set_sessions_max(3);
  harness_.Start();
  TestSession a = MustOpen("a");
  const TestSession b = MustOpen("b");
  const TestSession c = MustOpen("c");
  const absl::Status status = harness_.Open("a").status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  a.fd.reset();
  // The engine sees the end of the session in its own time.
  EXPECT_TRUE(Harness::Eventually([this] { return harness_.Open("a").ok(); }));
}

// The control socket's buffer is limited; the other connections wait, none is
// lost, and other jobs are not delayed.
TEST_F(SupervisorLimitsTest, EngineThatDoesNotReadStallsItsJobAlone) {
  harness_.Start();
  std::vector<UniqueFd> fds;
  v1::Hello hello = Harness::GoodHello("deaf");
  for (int i = 0; i < 300; ++i) {
    fds.push_back(harness_.Connect());
    ASSERT_TRUE(Harness::SendHello(fds.back().get(), hello).ok());
  }
  MustOpen("other");
  EXPECT_FALSE(harness_.Find("deaf")->failed);
}

// The connections are those in the control socket, and those waiting for room
// in it.
TEST_F(SupervisorLimitsTest, WhoGivesUpBeforeTheEngineReadsIsCountedNoLonger) {
  harness_.config().mutable_limits()->set_sessions_max(400);
  harness_.config().mutable_engine()->set_restarts_max(0);
  harness_.Start();
  const auto sockets = [] { return os::OpenSockets(::getpid())->size(); };
  MustOpen("other");
  const size_t before = sockets();
  std::vector<UniqueFd> fds;
  const v1::Hello hello = Harness::GoodHello("deaf");
  while (!absl::IsResourceExhausted(harness_.Open("other").status())) {
    fds.push_back(harness_.Connect());
    ASSERT_TRUE(Harness::SendHello(fds.back().get(), hello).ok());
  }
  EXPECT_GE(fds.size(), 390u);
  fds.clear();
  EXPECT_TRUE(
      Harness::Eventually([this] { return harness_.Open("other").ok(); }));
  // Clients and daemon share this process; the engine has a few.
  EXPECT_TRUE(Harness::Eventually([&] { return sockets() <= before + 10; }));
  // The engine would not end when it is told to.
  ASSERT_EQ(::kill(harness_.Find("deaf")->engine_pid, SIGKILL), 0);
  EXPECT_TRUE(
      Harness::Eventually([this] { return harness_.Find("deaf")->failed; }));
}

TEST_F(SupervisorLimitsTest, WhoGivesUpWhileTheEngineStartsMakesRoomForOthers) {
  harness_.config().mutable_limits()->set_sessions_max(2 *
                                                       JobHost::kWaitingMax);
  harness_.Start();
  const v1::Hello hello = Harness::GoodHello("never-ready");
  for (size_t i = 0; i < JobHost::kWaitingMax + 100; ++i) {
    const UniqueFd gone = harness_.Connect();
    ASSERT_TRUE(Harness::SendHello(gone.get(), hello).ok());
    // At most as many at once as may be in their handshake.
    if (i % 100 == 0) MustOpen("other");
  }
  const UniqueFd late = harness_.Connect();
  ASSERT_TRUE(Harness::SendHello(late.get(), hello).ok());
  MustOpen("other");  // the supervisor has seen them all
  pollfd refused{late.get(), POLLIN | POLLRDHUP, 0};
  EXPECT_EQ(::poll(&refused, 1, 0), 0);
}

TEST_F(SupervisorLimitsTest, FloodBeyondTheFdLimitLeavesAcceptingIntact) {
  harness_.Start();
  TestSession session = MustOpen("a");
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  // Clients and daemon share this process: the remaining fds serve both ends.
  const UniqueFd next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const rlimit tight = {static_cast<rlim_t>(next.get() + 40), limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::vector<UniqueFd> flood;
  while (true) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd.ok()) break;
    flood.push_back(std::move(fd));
  }
  // Sockets are opened first, then connected: each needs an fd on the other
  // side.
  flood.resize(flood.size() - 4);
  const std::string path = harness_.socket();
  for (const UniqueFd& fd : flood) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    (void)::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                    sizeof(address));
  }
  // Connections without a place are refused and closed.
  EXPECT_TRUE(Harness::ClosedByPeer(flood.back().get()));
  const auto refused = Harness::ReceiveReply(flood.back().get());
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  flood.clear();
  EXPECT_TRUE(Harness::Eventually([this] { return harness_.Open("a").ok(); }));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// The job has no state that could be lost.
TEST_F(SupervisorLimitsTest, JobWhoseEngineFindsNoFdsIsRefusedAndGoes) {
  harness_.Start();
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const UniqueFd next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const rlimit tight = {static_cast<rlim_t>(next.get() + 40), limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::vector<UniqueFd> taken;
  do {
    taken.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  } while (taken.back().ok());
  // The freed fds serve both ends of the connection, and one the job's files.
  taken.resize(taken.size() - 4);
  const absl::Status status = harness_.Open("a").status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("Too many open files"), HasSubstr("ulimit -n")));
  EXPECT_TRUE(
      Harness::Eventually([this] { return !harness_.Find("a").has_value(); }));
  taken.clear();
  EXPECT_NE(MustOpen("a").engine_pid, 0u);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_F(SupervisorLimitsTest, JobWithStateThatFindsNoFdsIsKept) {
  harness_.config().mutable_engine()->set_restarts_max(1);
  harness_.Start();
  const auto engine = static_cast<pid_t>(MustOpen("a").engine_pid);
  const std::string state = harness_.JobDirectory("a") + "/state";
  ASSERT_TRUE(std::filesystem::create_directory(state));
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {0, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  ASSERT_EQ(::kill(engine, SIGKILL), 0);
  EXPECT_TRUE(
      Harness::Eventually([this] { return harness_.Find("a")->failed; }));
  EXPECT_TRUE(Exists(state));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_THAT(harness_.Find("a")->reason, HasSubstr("Too many open files"));
}

}  // namespace
}  // namespace optstate::supervisor
