#include "server/admin/grpc_refusals.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/unique_fd.h"
#include "server/os/event_loop.h"

namespace optstate::admin {
namespace {

// The limit of each wait, in real time, long enough for any machine.
constexpr int kPatienceMs = 60'000;

// A connection: the peer's end, and the daemon's.
struct Connection {
  UniqueFd peer;
  UniqueFd daemon;
};

// One of the user of this test.
Connection Unix() {
  int fds[2] = {-1, -1};
  EXPECT_EQ(
      ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds),
      0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// One over TCP; nullopt: this machine has no loopback.
std::optional<Connection> Tcp() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), name, size) != 0 ||
      ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), name, &size) != 0) {
    return std::nullopt;
  }
  Connection made;
  made.peer = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(made.peer.get(), name, size) != 0) return std::nullopt;
  made.daemon = UniqueFd(::accept4(listener.get(), nullptr, nullptr,
                                   SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!made.daemon.ok()) return std::nullopt;
  return made;
}

// Returns whether the first thing that comes is an answer, and not the end.
bool IsAnswered(const UniqueFd& peer) {
  pollfd entry{peer.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, kPatienceMs), 1) << "neither answer nor end";
  char buffer[1024];
  return ::recv(peer.get(), buffer, sizeof(buffer), MSG_DONTWAIT) > 0;
}

// Returns whether a connection over a unix socket, whose answer was read, has
// been closed since.
bool IsOver(const UniqueFd& peer) {
  char byte;
  return ::recv(peer.get(), &byte, 1, MSG_DONTWAIT) == 0;
}

class GrpcRefusalsTest : public testing::Test {
 protected:
  // Refuses a connection; returns the peer's end.
  UniqueFd Refuse(Connection connection) {
    refusals_.Refuse(std::move(connection.daemon),
                     absl::ResourceExhaustedError("too many"));
    return std::move(connection.peer);
  }

  std::unique_ptr<os::EventLoop> loop_ = *os::EventLoop::Create();
  GrpcRefusals refusals_{loop_.get()};
};

TEST_F(GrpcRefusalsTest, AFloodOfOneUserTakesItsOwnPlacesAlone) {
  std::vector<UniqueFd> flood;
  for (size_t i = 0; i < GrpcRefusals::kRefusalsMax; ++i) {
    flood.push_back(Refuse(Unix()));
    ASSERT_TRUE(IsAnswered(flood.back())) << i;
  }
  EXPECT_FALSE(IsAnswered(Refuse(Unix())));
  for (const UniqueFd& each : flood) EXPECT_FALSE(IsOver(each));
}

TEST_F(GrpcRefusalsTest, OthersGetPlacesOfAFlood) {
  std::vector<UniqueFd> flood;
  for (size_t i = 0; i < GrpcRefusals::kRefusalsMax; ++i) {
    flood.push_back(Refuse(Unix()));
    ASSERT_TRUE(IsAnswered(flood.back())) << i;
  }
  std::vector<UniqueFd> others;
  for (size_t i = 0; i < GrpcRefusals::kRefusalsMax / 2; ++i) {
    std::optional<Connection> connection = Tcp();
    if (!connection.has_value()) GTEST_SKIP() << "this machine has no loopback";
    others.push_back(Refuse(*std::move(connection)));
    EXPECT_TRUE(IsAnswered(others.back())) << i;
    // The oldest of the flood makes room.
    EXPECT_TRUE(IsOver(flood[i])) << i;
    EXPECT_FALSE(IsOver(flood[i + 1])) << i;
  }
  // Both have as many now, so neither takes from the other.
  EXPECT_FALSE(IsAnswered(Refuse(*Tcp())));
  EXPECT_FALSE(IsAnswered(Refuse(Unix())));
  EXPECT_FALSE(IsOver(flood.back()));
}

}  // namespace
}  // namespace optstate::admin
