#include "server/accept/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>
#include <utility>
#include <vector>

#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "server/observe/counters.h"

namespace optstate::accept {
namespace {

using ::testing::HasSubstr;

constexpr uid_t kUid = 4711;

PeerCredentials UnixPeer(uid_t uid) {
  return {.caller = access::UnixCaller(uid), .pid = 7};
}

std::string Header(uint32_t payload_bytes) {
  std::string header(shm::kFrameMagic, 4);
  for (int shift = 0; shift < 32; shift += 8) {
    header += static_cast<char>((payload_bytes >> shift) & 0xff);
  }
  return header;
}

std::string HelloFrame(const std::string& job) {
  v1::Hello hello;
  hello.set_job(job);
  const std::string payload = hello.SerializeAsString();
  return Header(static_cast<uint32_t>(payload.size())) + payload;
}

class HandshakeTest : public testing::Test {
 protected:
  HandshakeTest() { Create(absl::InfiniteDuration()); }

  void Create(absl::Duration timeout) {
    Handshakes::Callbacks callbacks;
    callbacks.on_hello = [this](UniqueFd fd, const PeerCredentials& peer,
                                const v1::Hello& hello) {
      EXPECT_EQ(peer.caller.uid, kUid);
      fds_.push_back(std::move(fd));
      hellos_.push_back(hello.job());
    };
    callbacks.on_grpc = [this](UniqueFd fd, const PeerCredentials&) {
      fds_.push_back(std::move(fd));
      ++grpc_;
    };
    callbacks.on_grpc_refused = [this](UniqueFd, const absl::Status& why) {
      refused_grpc_.push_back(why);
    };
    handshakes_.emplace(loop_.get(), timeout, std::move(callbacks));
  }

  // Starts a handshake; returns the peer's end.
  UniqueFd Connect(uid_t uid = kUid) { return ConnectAs(UnixPeer(uid)); }

  UniqueFd ConnectAs(const PeerCredentials& peer,
                     const absl::Status& verdict = absl::OkStatus()) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                           0, fds),
              0);
    handshakes_->Start(UniqueFd(fds[0]), peer, verdict);
    return UniqueFd(fds[1]);
  }

  // Returns whether the connection is neither answered nor closed.
  static bool IsPending(const UniqueFd& fd) {
    char byte;
    return ::recv(fd.get(), &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN;
  }

  void Send(const UniqueFd& fd, absl::string_view bytes) {
    EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }

  // Lets the loop handle everything sent so far; once a test.
  void RunLoop() {
    Turn(4);
    loop_->Run();
  }

  absl::Status Refusal(const UniqueFd& fd) {
    const auto frame = shm::ReceiveFrame(fd.get(), shm::kHelloBytesMax,
                                         absl::Now() + absl::Seconds(30));
    if (!frame.ok()) return absl::UnknownError(frame.status().ToString());
    v1::HelloReply reply;
    EXPECT_TRUE(reply.ParseFromString(frame->payload));
    return FromProto(reply.status());
  }

  // Runs turns of the loop: each is a wake-up of its own, with the fds that are
  // ready then.
  void Turn(int left) {
    if (left == 0) return loop_->Stop();
    loop_->Post([this, left] { Turn(left - 1); });
  }

  std::unique_ptr<os::EventLoop> loop_ = *os::EventLoop::Create();
  std::optional<Handshakes> handshakes_;
  std::vector<UniqueFd> fds_;
  std::vector<std::string> hellos_;
  std::vector<absl::Status> refused_grpc_;
  int grpc_ = 0;
};

TEST_F(HandshakeTest, ReadsTheHelloAndNothingBeyond) {
  const UniqueFd peer = Connect();
  Send(peer, HelloFrame("a") + "rest");
  RunLoop();
  EXPECT_THAT(hellos_, testing::ElementsAre("a"));
  char rest[8];
  ASSERT_EQ(::recv(fds_.at(0).get(), rest, sizeof(rest), 0), 4);
  EXPECT_EQ(std::string(rest, 4), "rest");
}

TEST_F(HandshakeTest, HandsHttp2OverUnread) {
  const UniqueFd peer = Connect();
  Send(peer, "PRI * HTTP/2.0");
  RunLoop();
  EXPECT_EQ(grpc_, 1);
  char begin[4];
  ASSERT_EQ(::recv(fds_.at(0).get(), begin, sizeof(begin), 0), 4);
  EXPECT_EQ(std::string(begin, 4), "PRI ");
}

TEST_F(HandshakeTest, AHelloMayBeEmpty) {
  const UniqueFd peer = Connect();
  Send(peer, Header(0));
  RunLoop();
  EXPECT_THAT(hellos_, testing::ElementsAre(""));
}

TEST_F(HandshakeTest, RefusesGarbage) {
  std::vector<UniqueFd> peers;
  for (const absl::string_view garbage :
       {absl::string_view("GET / HTTP/1.1\r\n"), absl::string_view("OPSX"),
        absl::string_view("PRX"), absl::string_view("\0", 1)}) {
    peers.push_back(Connect());
    Send(peers.back(), garbage);
  }
  RunLoop();
  for (const UniqueFd& peer : peers) {
    const absl::Status status = Refusal(peer);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("optstated's socket"));
  }
  EXPECT_THAT(hellos_, testing::IsEmpty());
}

TEST_F(HandshakeTest, TlsWhereThereIsNoneIsSaid) {
  const UniqueFd local = Connect();
  Send(local, "\x16\x03\x01\x02");
  const UniqueFd remote =
      ConnectAs({.caller = access::InsecureTcpCaller(), .address = "10.0.0.7"});
  Send(remote, "\x16\x03\x01\x02");
  RunLoop();
  for (const auto& [peer, use] : {std::pair(&local, "use unix:PATH or"),
                                  std::pair(&remote, "use grpc:HOST:PORT")}) {
    const absl::Status status = Refusal(*peer);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("began with TLS"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(use));
  }
}

// Such a peer is told in its own protocol, however its bytes arrive.
TEST_F(HandshakeTest, AVerdictIsToldOnceTheProtocolIsKnown) {
  const absl::Status verdict = absl::UnauthenticatedError("nobody known");
  const UniqueFd session = ConnectAs(UnixPeer(kUid), verdict);
  Send(session, HelloFrame("a"));
  const UniqueFd in_parts = ConnectAs(UnixPeer(kUid), verdict);
  Send(in_parts, "OP");
  const UniqueFd grpc = ConnectAs(UnixPeer(kUid), verdict);
  Send(grpc, "PRI * HTTP/2.0");
  loop_->Post([this, &in_parts] {
    loop_->Post([this, &in_parts] {
      Send(in_parts, "ST");
      Turn(4);
    });
  });
  loop_->Run();
  EXPECT_EQ(Refusal(session), verdict);
  EXPECT_EQ(Refusal(in_parts), verdict);
  EXPECT_THAT(refused_grpc_, testing::ElementsAre(verdict));
  EXPECT_THAT(hellos_, testing::IsEmpty());
  EXPECT_EQ(grpc_, 0);
}

TEST_F(HandshakeTest, RefusesOversizedAndMalformedHellos) {
  const UniqueFd oversized = Connect();
  Send(oversized, Header(shm::kHelloBytesMax + 1));
  const UniqueFd malformed = Connect();
  Send(malformed, Header(3) + "\xff\xff\xff");
  RunLoop();
  EXPECT_THAT(std::string(Refusal(oversized).message()),
              HasSubstr("a Hello of 65537 bytes"));
  EXPECT_TRUE(absl::IsInvalidArgument(Refusal(malformed)));
}

TEST_F(HandshakeTest, RefusesWhoeverIsTooSlow) {
  Create(absl::Milliseconds(1));
  const UniqueFd silent = Connect();
  const UniqueFd half = Connect();
  Send(half, HelloFrame("a").substr(0, 9));
  // The loop runs until the timeouts have come: each is answered from the loop.
  loop_->RunAfter(absl::Milliseconds(5), [this] { loop_->Stop(); });
  loop_->Run();
  EXPECT_TRUE(absl::IsDeadlineExceeded(Refusal(silent)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Refusal(half)));
}

TEST_F(HandshakeTest, OneUserCannotTakeAllPlaces) {
  const uint64_t others = observe::LengthOf(observe::Queue::kHandshake);
  std::vector<UniqueFd> peers;
  for (size_t i = 0; i < Handshakes::kPendingMax / 2; ++i) {
    peers.push_back(Connect());
  }
  const UniqueFd refused = Connect();
  EXPECT_TRUE(absl::IsResourceExhausted(Refusal(refused)));
  const UniqueFd other = Connect(/*uid=*/2000);
  EXPECT_EQ(observe::LengthOf(observe::Queue::kHandshake),
            others + Handshakes::kPendingMax / 2 + 1);
  Send(peers[0], "garbage!");
  RunLoop();
  EXPECT_EQ(observe::LengthOf(observe::Queue::kHandshake),
            others + Handshakes::kPendingMax / 2);
  char byte;
  EXPECT_EQ(::recv(other.get(), &byte, 1, MSG_DONTWAIT), -1);
  EXPECT_EQ(errno, EAGAIN);
  // The place of the refused connection is free again.
  const UniqueFd again = Connect();
  EXPECT_EQ(::recv(again.get(), &byte, 1, MSG_DONTWAIT), -1);
  EXPECT_EQ(errno, EAGAIN);
}

// Over TCP every peer has the daemon's uid, but does not count as its user.
TEST_F(HandshakeTest, TcpTakesNobodysPlacesButItsOwn) {
  const auto tcp = [](std::string address) {
    return PeerCredentials{.caller = access::InsecureTcpCaller(),
                           .address = std::move(address)};
  };
  std::vector<UniqueFd> peers;
  for (size_t i = 0; i < Handshakes::kPendingMax / 2; ++i) {
    peers.push_back(ConnectAs(tcp("10.0.0.7")));
  }
  const absl::Status refused = Refusal(ConnectAs(tcp("10.0.0.7")));
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("address 10.0.0.7"));
  EXPECT_TRUE(IsPending(ConnectAs(tcp("10.0.0.8"))));
  EXPECT_TRUE(IsPending(Connect(::geteuid())));
}

// Many users, or machines, together take no places of root or the daemon's
// user.
TEST_F(HandshakeTest, OperatorsHaveRoomOfTheirOwn) {
  std::vector<UniqueFd> peers;
  for (size_t i = 0; i < Handshakes::kPendingMax; ++i) {
    peers.push_back(Connect(100000 + static_cast<uid_t>(i)));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(Refusal(Connect(/*uid=*/2000))));
  EXPECT_TRUE(IsPending(Connect(/*uid=*/0)));
  EXPECT_TRUE(IsPending(Connect(::geteuid())));
}

}  // namespace
}  // namespace optstate::accept
