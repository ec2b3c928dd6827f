// The real optstated, with a socket that a service manager has opened: this
// test stands for systemd.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/unique_fd.h"
#include "server/testing/daemon_fixture.h"

namespace optstate::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class ActivationTest : public DaemonTest {
 protected:
  // Listens as a socket unit does.
  void Listen(const std::string& path, mode_t mode = 0666) {
    listener_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    ASSERT_EQ(
        ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address),
               sizeof(address)),
        0);
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    ASSERT_EQ(::listen(listener_.get(), 16), 0);
  }

  // Starts a daemon that gets the socket as its fd 3.
  pid_t StartActivated() {
    std::vector<std::string> args = {"server/optstated", "--state-dir", state(),
                                     "--socket", socket()};
    const std::string log = root() + "/log";
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    const int output = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
    ::dup2(listener_.get(), 3);
    ::fcntl(3, F_SETFD, 0);  // also where the socket had this number
    ::setenv("LISTEN_PID", absl::StrCat(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", "1", 1);
    ::setenv("LISTEN_FDNAMES", "socket", 1);
    std::vector<char*> argv;
    argv.reserve(args.size() + 1);
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }

  static std::string EnvironmentOf(int64_t pid) {
    std::ifstream file(absl::StrCat("/proc/", pid, "/environ"));
    return {std::istreambuf_iterator<char>(file), {}};
  }

  UniqueFd listener_;
};

TEST_F(ActivationTest, TheSocketOutlivesDaemonsAndUpgrades) {
  Listen(socket());
  // A connection of before the daemon waits for it.
  const UniqueFd early = Connect();
  ASSERT_TRUE(early.ok());
  const pid_t pid = StartActivated();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status() << Log();
  const int64_t engine = GetJob("a").engine_pid();
  EXPECT_THAT(EnvironmentOf(engine), Not(HasSubstr("LISTEN_")));
  EXPECT_FALSE(Exists(socket() + ".lock")) << "the lock is for sockets of ours";

  const auto reply = Upgrade(CopyOfTheBinary("next"));
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(AwaitUpgrade(reply->id()).pid(), pid);
  const auto second = Open("b");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_THAT(EnvironmentOf(GetJob("b").engine_pid()),
              Not(HasSubstr("LISTEN_")));

  ::kill(pid, SIGTERM);
  EXPECT_EQ(AwaitExit(pid).code, 0) << Log();
  // The socket is the service manager's, which listens on.
  EXPECT_TRUE(Exists(socket()));
  EXPECT_TRUE(Connect().ok());

  const pid_t next = StartActivated();
  EXPECT_TRUE(Open("a").ok()) << Log();
  ::kill(next, SIGKILL);
  EXPECT_EQ(AwaitExit(next).code, -SIGKILL);
  StartActivated();
  EXPECT_TRUE(Open("a").ok()) << Log();
}

TEST_F(ActivationTest, ASocketThatTheConfigurationDoesNotNameIsRefused) {
  const std::string other = root() + "/other.sock";
  Listen(other);
  const ProcessExit ended = AwaitExit(StartActivated());
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.output,
              AllOf(HasSubstr("bound to unix:" + other),
                    HasSubstr("the configuration has unix:" + socket())));
}

TEST_F(ActivationTest, WiderPermissionsThanConfiguredAreRefused) {
  Listen(socket(), 0777);
  const ProcessExit ended = AwaitExit(StartActivated());
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.output, HasSubstr("SocketMode="));
}

}  // namespace
}  // namespace optstate::server
