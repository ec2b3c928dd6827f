#include "server/accept/activated_sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/unique_fd.h"
#include "server/os/private_directory.h"

namespace optstate::accept {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kPid[] = "LISTEN_PID";
constexpr char kCount[] = "LISTEN_FDS";
constexpr char kNames[] = "LISTEN_FDNAMES";

void SetVariables(const std::string& pid, const std::string& count,
                  const std::string& names) {
  ::setenv(kPid, pid.c_str(), 1);
  ::setenv(kCount, count.c_str(), 1);
  ::setenv(kNames, names.c_str(), 1);
}

std::string OwnPid() { return absl::StrCat(::getpid()); }

void ExpectNoVariables() {
  for (const char* variable : {kPid, kCount, kNames}) {
    EXPECT_EQ(::getenv(variable), nullptr) << variable;
  }
}

TEST(TakeActivatedSocketsTest, NothingIsPassed) {
  for (const char* variable : {kPid, kCount, kNames}) ::unsetenv(variable);
  const auto sockets = TakeActivatedSockets();
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  EXPECT_THAT(*sockets, IsEmpty());
}

TEST(TakeActivatedSocketsTest, WhatIsPassedIsTakenOnce) {
  if (::fcntl(3, F_GETFD) < 0) {
    UniqueFd some(::open("/dev/null", O_RDONLY));
    if (some.get() == 3) {
      some.release();
    } else {
      ASSERT_EQ(::dup2(some.get(), 3), 3);
    }
  }
  ASSERT_EQ(::fcntl(3, F_SETFD, 0), 0);
  SetVariables(OwnPid(), "1", "socket");
  const auto sockets = TakeActivatedSockets();
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  ASSERT_EQ(sockets->size(), 1u);
  EXPECT_EQ(sockets->at(0).fd, 3);
  EXPECT_EQ(sockets->at(0).name, "socket");
  EXPECT_EQ(::fcntl(3, F_GETFD), FD_CLOEXEC);
  // Engines and the next build find nothing.
  ExpectNoVariables();
}

TEST(TakeActivatedSocketsTest, WhatIsAnotherProcessesIsLeft) {
  SetVariables(absl::StrCat(::getppid()), "1", "socket");
  const auto sockets = TakeActivatedSockets();
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  EXPECT_THAT(*sockets, IsEmpty());
  ExpectNoVariables();
}

TEST(TakeActivatedSocketsTest, VariablesThatContradictThemselvesAreRefused) {
  for (const char* count : {"", "x", "-1", "1000000"}) {
    SetVariables(OwnPid(), count, "socket");
    const absl::Status refused = TakeActivatedSockets().status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("LISTEN_FDS"));
  }
  SetVariables(OwnPid(), "2", "socket");
  const absl::Status refused = TakeActivatedSockets().status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("LISTEN_FDNAMES=socket names 1 of 2"));
}

class AdoptActivatedSocketsTest : public testing::Test {
 protected:
  AdoptActivatedSocketsTest() {
    // The name is short, because socket paths are.
    std::string name = "/tmp/activated-XXXXXX";
    root_ = ::mkdtemp(name.data());
    config_.set_socket(Path("s"));
    config_.set_socket_mode(0660);
  }
  ~AdoptActivatedSocketsTest() override {
    EXPECT_TRUE(os::RemoveTree(root_).ok());
  }

  std::string Path(const std::string& name) const { return root_ + "/" + name; }
  bool Exists(const std::string& name) const {
    return ::access(Path(name).c_str(), F_OK) == 0;
  }

  // Makes a socket as the service manager does; returns its fd, which whoever
  // adopts it owns.
  int MakeUnix(const std::string& name, mode_t mode = 0660,
               int type = SOCK_STREAM, bool listens = true) {
    const int fd = ::socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, Path(name).c_str());
    EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address),
                     sizeof(address)),
              0);
    EXPECT_EQ(::chmod(Path(name).c_str(), mode), 0);
    if (listens) {
      EXPECT_EQ(::listen(fd, 16), 0);
    }
    return fd;
  }
  // Makes one at a port of the kernel's choice; sets `name` to HOST:PORT.
  static int MakeTcp(std::string* name) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(fd, any, size), 0);
    EXPECT_EQ(::listen(fd, 16), 0);
    EXPECT_EQ(::getsockname(fd, any, &size), 0);
    *name = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    return fd;
  }

  absl::Status Refusal(const std::vector<ActivatedSocket>& sockets) {
    const absl::Status status =
        AdoptActivatedSockets(config_, sockets).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return status;
  }
  void ExpectRefused(int fd, const std::string& name, const std::string& why) {
    EXPECT_THAT(std::string(Refusal({{fd, name}}).message()),
                AllOf(HasSubstr(absl::StrCat("fd ", fd, " (\"", name, "\")")),
                      HasSubstr(why)));
  }

  std::string root_;
  v1::DaemonConfig config_;
};

TEST_F(AdoptActivatedSocketsTest, TheSocketIsTakenOverAndItsFileLeft) {
  const int fd = MakeUnix("s");
  auto listeners = AdoptActivatedSockets(config_, {{fd, "socket"}});
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  const std::string name = "unix:" + Path("s");
  ASSERT_TRUE(listeners->contains(name));
  const Listener& listener = *listeners->at(name);
  EXPECT_EQ(listener.fd(), fd);
  EXPECT_EQ(listener.name(), name);
  EXPECT_EQ(listener.lock_fd(), -1);
  EXPECT_EQ(::fcntl(fd, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
  listeners->clear();
  EXPECT_TRUE(Exists("s"));
}

TEST_F(AdoptActivatedSocketsTest, AddressesOfListenAreTakenOver) {
  std::string tcp;
  const int tcp_fd = MakeTcp(&tcp);
  config_.add_listen(tcp);
  config_.add_listen("unix:" + Path("other"));
  const auto listeners = AdoptActivatedSockets(
      config_, {{tcp_fd, "listen"}, {MakeUnix("other"), "listen"}});
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  EXPECT_EQ(listeners->size(), 2u);
  ASSERT_TRUE(listeners->contains(tcp));
  EXPECT_FALSE(listeners->at(tcp)->is_unix());
  EXPECT_TRUE(listeners->contains("unix:" + Path("other")));
}

TEST_F(AdoptActivatedSocketsTest, AnotherPathIsRefused) {
  ExpectRefused(MakeUnix("other"), "socket",
                absl::StrCat("bound to unix:", Path("other"),
                             ", and the configuration has unix:", Path("s")));
  std::string tcp;
  const int fd = MakeTcp(&tcp);
  ExpectRefused(fd, "listen", "the configuration has no address there");
}

TEST_F(AdoptActivatedSocketsTest, AnotherTypeIsRefused) {
  ExpectRefused(MakeUnix("s", 0660, SOCK_DGRAM, /*listens=*/false), "socket",
                "no stream socket: name it with ListenStream=");
  ASSERT_EQ(::unlink(Path("s").c_str()), 0);
  ExpectRefused(MakeUnix("s", 0660, SOCK_SEQPACKET), "socket",
                "no stream socket");
  ASSERT_EQ(::unlink(Path("s").c_str()), 0);
  ExpectRefused(MakeUnix("s", 0660, SOCK_STREAM, /*listens=*/false), "socket",
                "does not listen: Accept=no");
  ExpectRefused(::open("/dev/null", O_RDONLY | O_CLOEXEC), "socket",
                "which is no socket");
}

TEST_F(AdoptActivatedSocketsTest, AnUnknownNameIsRefused) {
  ExpectRefused(MakeUnix("s"), "optstated.socket", "FileDescriptorName=socket");
}

TEST_F(AdoptActivatedSocketsTest, OtherPermissionsAreRefused) {
  const int fd = MakeUnix("s", 0666);
  ExpectRefused(fd, "socket",
                "permissions 0666, and the configuration has socket_mode 0660");
}

TEST_F(AdoptActivatedSocketsTest, ASocketWhoseFileIsGoneIsRefused) {
  const int fd = MakeUnix("s");
  ASSERT_EQ(::unlink(Path("s").c_str()), 0);
  ExpectRefused(fd, "socket", "whose file was removed");
}

TEST_F(AdoptActivatedSocketsTest, OneAddressComesOnce) {
  const int fd = MakeUnix("s");
  const int again = ::dup(fd);
  EXPECT_THAT(
      std::string(Refusal({{fd, "socket"}, {again, "socket"}}).message()),
      HasSubstr("one is enough"));
}

}  // namespace
}  // namespace optstate::accept
