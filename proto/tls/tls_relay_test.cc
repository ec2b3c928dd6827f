// Random traffic through two relays, one of each side, as it runs between a
// client and a daemon. Prints its seed; OPTSTATE_TEST_SEED repeats one.
#include "proto/tls/tls_relay.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "proto/tls/test_certificates.h"

namespace optstate::tls {
namespace {

uint64_t Seed() {
  uint64_t seed = 0;
  const char* const text = std::getenv("OPTSTATE_TEST_SEED");
  if (text == nullptr || !absl::SimpleAtoi(text, &seed)) {
    seed = std::random_device()();
  }
  std::printf("OPTSTATE_TEST_SEED=%llu\n",
              static_cast<unsigned long long>(seed));
  return seed;
}

struct Pair {
  UniqueFd a;
  UniqueFd b;
};

Pair SocketPair(int flags = 0) {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0, fds),
            0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Runs a relay as its owners do, until the connection is over.
absl::Status RunToEnd(TlsRelay* relay) {
  bool goes_on = relay->Pump();
  while (goes_on) {
    pollfd entries[2] = {
        {.fd = relay->watches_network() ? relay->network() : -1,
         .events = static_cast<int16_t>(relay->network_events()),
         .revents = 0},
        {.fd = relay->watches_inside() ? relay->inside() : -1,
         .events = static_cast<int16_t>(relay->inside_events()),
         .revents = 0}};
    ::poll(entries, 2, -1);
    goes_on = relay->OnEvents(static_cast<uint16_t>(entries[0].revents),
                              static_cast<uint16_t>(entries[1].revents));
  }
  return relay->status();
}

std::string Bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string bytes(size, '\0');
  for (char& each : bytes) each = static_cast<char>(random());
  return bytes;
}

void SendInPieces(int fd, const std::string& bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < bytes.size();) {
    const size_t most = random() % 4 == 0 ? 200'000 : 2'000;
    const size_t size = std::min(bytes.size() - at, random() % most + 1);
    const ssize_t sent = ::send(fd, bytes.data() + at, size, MSG_NOSIGNAL);
    ASSERT_GT(sent, 0);
    at += static_cast<size_t>(sent);
  }
}

std::string ReceiveAll(int fd, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string all;
  std::string buffer(100'000, '\0');
  while (true) {
    const size_t size = random() % buffer.size() + 1;
    const ssize_t count = ::recv(fd, buffer.data(), size, 0);
    if (count <= 0) return all;
    all.append(buffer, 0, static_cast<size_t>(count));
  }
}

class TlsRelayTest : public testing::Test {
 protected:
  void SetUp() override {
    const TestCa ca(::testing::TempDir(), "relay-ca");
    const TlsFiles files = ca.Issue("relay", "DNS:relay");
    Pair network = SocketPair(SOCK_NONBLOCK);
    auto server = *TlsStream::Accept(*TlsContext::Server(files));
    auto client = *TlsStream::Connect(*TlsContext::Client(files), "relay");
    for (int i = 0; i < 8; ++i) {
      ASSERT_TRUE(client->Handshake().ok());
      server->TakeEncrypted(std::exchange(client->output(), ""));
      ASSERT_TRUE(server->Handshake().ok());
      client->TakeEncrypted(std::exchange(server->output(), ""));
    }
    ASSERT_TRUE(client->is_ready() && server->is_ready());
    server_ = MakeRelay(std::move(network.a), std::move(server), &daemon_end_);
    client_ = MakeRelay(std::move(network.b), std::move(client), &client_end_);
  }

  static std::unique_ptr<TlsRelay> MakeRelay(UniqueFd network,
                                             std::unique_ptr<TlsStream> stream,
                                             UniqueFd* outside) {
    Pair inside = SocketPair();
    *outside = std::move(inside.b);
    const int flags = ::fcntl(inside.a.get(), F_GETFL);
    ::fcntl(inside.a.get(), F_SETFL, flags | O_NONBLOCK);
    return std::make_unique<TlsRelay>(std::move(network), std::move(inside.a),
                                      std::move(stream));
  }

  // Starts both relays; each closes its sockets when it is over.
  void Start() {
    threads_[0] = std::thread([this] {
      server_status_ = RunToEnd(server_.get());
      server_.reset();
    });
    threads_[1] = std::thread([this] {
      client_status_ = RunToEnd(client_.get());
      client_.reset();
    });
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
  }

  const uint64_t seed_ = Seed();
  UniqueFd daemon_end_;
  UniqueFd client_end_;
  std::unique_ptr<TlsRelay> server_;
  std::unique_ptr<TlsRelay> client_;
  absl::Status server_status_;
  absl::Status client_status_;
  std::thread threads_[2];
};

TEST_F(TlsRelayTest, BothDirectionsAtOnce) {
  Start();
  const std::string up = Bytes(3'000'000 + seed_ % 100'000, seed_);
  const std::string down = Bytes(2'000'000 + seed_ % 70'000, seed_ + 1);
  std::string got_up;
  std::string got_down;
  std::thread daemon_reads(
      [&] { got_up = ReceiveAll(daemon_end_.get(), seed_ + 2); });
  std::thread client_reads(
      [&] { got_down = ReceiveAll(client_end_.get(), seed_ + 3); });
  std::thread daemon_writes([&] {
    SendInPieces(daemon_end_.get(), down, seed_ + 4);
    ::shutdown(daemon_end_.get(), SHUT_WR);
  });
  SendInPieces(client_end_.get(), up, seed_ + 5);
  ::shutdown(client_end_.get(), SHUT_WR);
  daemon_writes.join();
  daemon_reads.join();
  client_reads.join();
  Join();
  EXPECT_TRUE(got_up == up) << got_up.size() << " of " << up.size();
  EXPECT_TRUE(got_down == down) << got_down.size() << " of " << down.size();
  EXPECT_TRUE(server_status_.ok()) << server_status_;
  EXPECT_TRUE(client_status_.ok()) << client_status_;
}

TEST_F(TlsRelayTest, AHalfCloseLeavesTheOtherDirection) {
  Start();
  ::shutdown(client_end_.get(), SHUT_WR);
  EXPECT_EQ(ReceiveAll(daemon_end_.get(), seed_), "");
  const std::string down = Bytes(500'000, seed_);
  std::string got;
  std::thread reads([&] { got = ReceiveAll(client_end_.get(), seed_); });
  SendInPieces(daemon_end_.get(), down, seed_);
  ::shutdown(daemon_end_.get(), SHUT_WR);
  reads.join();
  Join();
  EXPECT_TRUE(got == down);
}

// A closed end's last bytes arrive, also while the other one still sends.
TEST_F(TlsRelayTest, TheLastBytesOfAClosedEndArrive) {
  Start();
  const std::string last = Bytes(100'000, seed_);
  std::string got;
  std::thread reads([&] { got = ReceiveAll(client_end_.get(), seed_); });
  ASSERT_GT(::send(client_end_.get(), "unread", 6, MSG_NOSIGNAL), 0);
  SendInPieces(daemon_end_.get(), last, seed_);
  daemon_end_.reset();
  reads.join();
  EXPECT_TRUE(got == last) << got.size();
  client_end_.reset();
  Join();
}

// Bytes that are not read stop the sender after a bounded number of bytes.
TEST_F(TlsRelayTest, AReaderThatIsSlowStopsTheSender) {
  const auto buffer = [](int fd) {
    const int size = 32 << 10;
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
  };
  for (const int fd :
       {client_end_.get(), daemon_end_.get(), client_->network(),
        server_->network(), client_->inside(), server_->inside()}) {
    buffer(fd);
  }
  Start();
  const std::string piece(10'000, 'x');
  size_t sent = 0;
  pollfd entry = {.fd = client_end_.get(), .events = POLLOUT, .revents = 0};
  // The end is full when it stays so for a while; a relay that buffered without
  // bound would never be.
  while (sent < (64u << 20) && ::poll(&entry, 1, 500) == 1) {
    const ssize_t count = ::send(client_end_.get(), piece.data(), piece.size(),
                                 MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count > 0) sent += static_cast<size_t>(count);
  }
  EXPECT_LT(sent, 4u << 20);
  std::thread writes([&] { ::shutdown(client_end_.get(), SHUT_WR); });
  EXPECT_EQ(ReceiveAll(daemon_end_.get(), seed_).size(), sent);
  writes.join();
  ::shutdown(daemon_end_.get(), SHUT_WR);
  Join();
}

// The network goes away without a close of TLS, as when a process is killed.
TEST_F(TlsRelayTest, ALostNetworkEndsBothSides) {
  ::shutdown(client_->network(), SHUT_RDWR);
  Start();
  EXPECT_EQ(ReceiveAll(daemon_end_.get(), seed_), "");
  EXPECT_EQ(ReceiveAll(client_end_.get(), seed_), "");
  daemon_end_.reset();
  client_end_.reset();
  Join();
}

TEST_F(TlsRelayTest, BytesThatAreNoTlsEndTheConnection) {
  const int network = client_->network();
  const std::string garbage = Bytes(5'000, seed_);
  ASSERT_GT(::send(network, garbage.data(), garbage.size(), 0), 0);
  Start();
  EXPECT_EQ(ReceiveAll(daemon_end_.get(), seed_), "");
  daemon_end_.reset();
  client_end_.reset();
  Join();
  EXPECT_FALSE(server_status_.ok());
}

}  // namespace
}  // namespace optstate::tls
