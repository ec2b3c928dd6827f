#include "proto/shm/frame.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::shm {
namespace {

using ::testing::HasSubstr;

// Returns a deadline so far away that a test which reaches it has failed.
absl::Time Later() { return absl::Now() + absl::Minutes(5); }
absl::Time Soon() { return absl::Now() + absl::Milliseconds(20); }

struct SocketPair {
  UniqueFd a;
  UniqueFd b;
};

SocketPair UnixPair(int flags = 0) {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0, ends),
            0);
  return {.a = UniqueFd(ends[0]), .b = UniqueFd(ends[1])};
}

SocketPair TcpPair() {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(listener.get(), generic, size), 0);
  EXPECT_EQ(listen(listener.get(), 1), 0);
  EXPECT_EQ(getsockname(listener.get(), generic, &size), 0);
  SocketPair pair;
  pair.a.reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(pair.a.get(), generic, size), 0);
  pair.b.reset(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return pair;
}

// Makes a file in memory that holds `text`.
UniqueFd FileWith(const std::string& text) {
  UniqueFd fd(memfd_create("file", MFD_CLOEXEC));
  EXPECT_EQ(write(fd.get(), text.data(), text.size()),
            static_cast<ssize_t>(text.size()));
  return fd;
}

std::string ContentOf(const UniqueFd& fd) {
  char text[64];
  const ssize_t size = pread(fd.get(), text, sizeof(text), 0);
  return std::string(text, size < 0 ? 0 : size);
}

// Makes a payload with a new byte at i mod 251, so that no shift goes
// unnoticed.
std::string PayloadOf(size_t bytes) {
  std::string payload(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) payload[i] = static_cast<char>(i % 251);
  return payload;
}

std::string Header(uint32_t payload_bytes) {
  std::string header = "OPST";
  for (int i = 0; i < 4; ++i) {
    header.push_back(static_cast<char>(payload_bytes >> (8 * i)));
  }
  return header;
}

void SendRaw(const UniqueFd& socket, const std::string& bytes) {
  ASSERT_EQ(send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}

// Sends bytes with fds beside them, as a peer without our code may send them.
void SendRawWithFds(const UniqueFd& socket, const std::string& bytes,
                    const std::vector<int>& fds) {
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  iovec io = {.iov_base = const_cast<char*>(bytes.data()),
              .iov_len = bytes.size()};
  msghdr message = {};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  ASSERT_EQ(sendmsg(socket.get(), &message, MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}

absl::StatusOr<Frame> Receive(const UniqueFd& socket) {
  return ReceiveFrame(socket.get(), kFrameBytesMax, Later());
}

void ExpectError(const absl::Status& status, absl::StatusCode code,
                 const std::string& reason) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
}

size_t OpenFdCount() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// Sends a small frame, then one that no socket buffer holds, then an empty one.
void ExpectFramesTravel(const SocketPair& pair) {
  const std::string large = PayloadOf(9 << 20);
  std::thread sender([&pair, &large] {
    for (const std::string& payload :
         {std::string("hello"), large, std::string()}) {
      const absl::Status status = SendFrame(pair.a.get(), payload, {}, Later());
      EXPECT_TRUE(status.ok()) << status;
    }
  });
  for (const std::string& payload :
       {std::string("hello"), large, std::string()}) {
    const auto frame = Receive(pair.b);
    EXPECT_TRUE(frame.ok()) << frame.status();
    if (!frame.ok()) break;
    EXPECT_TRUE(frame->payload == payload);
    EXPECT_TRUE(frame->fds.empty());
  }
  sender.join();
}

TEST(FrameTest, TravelOverBlockingSockets) { ExpectFramesTravel(UnixPair()); }

TEST(FrameTest, TravelOverNonBlockingSockets) {
  ExpectFramesTravel(UnixPair(SOCK_NONBLOCK));
}

TEST(FrameTest, TravelOverTcp) { ExpectFramesTravel(TcpPair()); }

TEST(FrameTest, HeaderIsTheDocumentedOne) {
  const SocketPair pair = UnixPair();
  ASSERT_TRUE(SendFrame(pair.a.get(), PayloadOf(0x0102), {}, Later()).ok());
  unsigned char bytes[8];
  ASSERT_EQ(recv(pair.b.get(), bytes, sizeof(bytes), MSG_WAITALL), 8);
  EXPECT_EQ(std::memcmp(bytes, "OPST\x02\x01\x00\x00", 8), 0);
}

TEST(FrameTest, ArrivesByteByByte) {
  const SocketPair pair = UnixPair();
  std::thread sender([&pair] {
    for (char byte : Header(3) + "abc") SendRaw(pair.a, std::string(1, byte));
  });
  const auto frame = Receive(pair.b);
  sender.join();
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->payload, "abc");
}

TEST(FrameTest, CarriesFds) {
  const SocketPair pair = UnixPair();
  const UniqueFd one = FileWith("one");
  const UniqueFd two = FileWith("two");
  ASSERT_TRUE(
      SendFrame(pair.a.get(), "files", {one.get(), two.get()}, Later()).ok());
  ASSERT_TRUE(SendFrame(pair.a.get(), "none", {}, Later()).ok());
  const auto frame = Receive(pair.b);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->payload, "files");
  ASSERT_EQ(frame->fds.size(), 2u);
  EXPECT_EQ(ContentOf(frame->fds[0]), "one");
  EXPECT_EQ(ContentOf(frame->fds[1]), "two");
  EXPECT_NE(fcntl(frame->fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  const auto next = Receive(pair.b);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(next->fds.empty());
}

TEST(FrameTest, FdsArriveOnceWithAFrameThatIsSentInParts) {
  const SocketPair pair = UnixPair();
  const UniqueFd file = FileWith("file");
  const std::string large = PayloadOf(4 << 20);
  std::thread sender([&] {
    EXPECT_TRUE(SendFrame(pair.a.get(), large, {file.get()}, Later()).ok());
  });
  const auto frame = Receive(pair.b);
  sender.join();
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->fds.size(), 1u);
  EXPECT_TRUE(frame->payload == large);
}

TEST(FrameTest, SenderRefusesTooMuch) {
  const SocketPair pair = UnixPair();
  const int fd = pair.a.get();
  ExpectError(SendFrame(fd, "x", {fd, fd, fd, fd, fd}, Later()),
              absl::StatusCode::kInvalidArgument, "5 fds");
  ExpectError(SendFrame(fd, std::string(kFrameBytesMax + 1, 'x'), {}, Later()),
              absl::StatusCode::kInvalidArgument, "67108865 bytes");
}

TEST(FrameTest, SenderRefusesFdsOverTcp) {
  const SocketPair pair = TcpPair();
  ExpectError(SendFrame(pair.a.get(), "x", {pair.a.get()}, Later()),
              absl::StatusCode::kInvalidArgument, "unix sockets only");
}

TEST(FrameTest, RefusesGarbage) {
  const SocketPair pair = UnixPair();
  SendRaw(pair.a, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  ExpectError(Receive(pair.b).status(), absl::StatusCode::kInvalidArgument,
              "not an optstate frame");
}

TEST(FrameTest, RefusesMoreThanTheReceiverTakes) {
  SocketPair pair = UnixPair();
  SendRaw(pair.a, Header(kHelloBytesMax + 1));
  ExpectError(ReceiveFrame(pair.b.get(), kHelloBytesMax, Later()).status(),
              absl::StatusCode::kInvalidArgument,
              "a frame of 65537 bytes; at most 65536");
  pair = UnixPair();
  SendRaw(pair.a, Header(~uint32_t{0}));
  ExpectError(ReceiveFrame(pair.b.get(), ~uint32_t{0}, Later()).status(),
              absl::StatusCode::kInvalidArgument, "at most 67108864");
}

TEST(FrameTest, ClosedPeer) {
  SocketPair pair = UnixPair();
  pair.a.reset();
  const absl::Status clean = Receive(pair.b).status();
  EXPECT_EQ(clean, absl::UnavailableError("closed by peer"));
  // SIGPIPE is not raised either.
  EXPECT_EQ(SendFrame(pair.b.get(), "x", {}, Later()).code(),
            absl::StatusCode::kUnavailable);
}

TEST(FrameTest, TruncatedFrames) {
  for (const std::string& part : {std::string("O"), Header(10).substr(0, 7),
                                  Header(10), Header(10) + "123456789"}) {
    SocketPair pair = UnixPair();
    SendRaw(pair.a, part);
    pair.a.reset();
    ExpectError(Receive(pair.b).status(), absl::StatusCode::kUnavailable,
                "within a frame");
  }
}

TEST(FrameTest, SilentPeerMeetsTheDeadline) {
  const SocketPair pair = UnixPair();
  ExpectError(ReceiveFrame(pair.b.get(), 100, Soon()).status(),
              absl::StatusCode::kDeadlineExceeded, "no whole frame");
  SendRaw(pair.a, Header(100) + "abc");
  ExpectError(ReceiveFrame(pair.b.get(), 100, Soon()).status(),
              absl::StatusCode::kDeadlineExceeded, "no whole frame");
}

TEST(FrameTest, TricklingPeerMeetsTheDeadline) {
  const SocketPair pair = UnixPair();
  SendRaw(pair.a, Header(kFrameBytesMax));
  std::atomic<bool> done = false;
  std::thread trickler([&] {
    while (!done) {
      send(pair.a.get(), "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
      std::this_thread::yield();
    }
  });
  ExpectError(ReceiveFrame(pair.b.get(), kFrameBytesMax, Soon()).status(),
              absl::StatusCode::kDeadlineExceeded, "no whole frame");
  done = true;
  trickler.join();
}

TEST(FrameTest, PeerThatDoesNotReadMeetsTheDeadline) {
  for (int flags : {0, int{SOCK_NONBLOCK}}) {
    const SocketPair pair = UnixPair(flags);
    ExpectError(SendFrame(pair.a.get(), PayloadOf(32 << 20), {}, Soon()),
                absl::StatusCode::kDeadlineExceeded, "does not read");
  }
}

TEST(FrameTest, WhatHasArrivedIsReceivedEvenAfterTheDeadline) {
  const SocketPair pair = UnixPair();
  ASSERT_TRUE(SendFrame(pair.a.get(), "here", {}, absl::InfinitePast()).ok());
  const auto frame = ReceiveFrame(pair.b.get(), 100, absl::InfinitePast());
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->payload, "here");
}

TEST(FrameTest, RefusedFdsAreClosed) {
  const size_t before = OpenFdCount();
  {
    const UniqueFd file = FileWith("file");
    const std::vector<int> one = {file.get()};
    const std::vector<int> five(5, file.get());

    SocketPair pair = UnixPair();
    SendRawWithFds(pair.a, Header(1) + "x", five);
    ExpectError(Receive(pair.b).status(), absl::StatusCode::kInvalidArgument,
                "more fds than a frame may carry: 4");

    pair = UnixPair();  // one fd at a time
    for (char byte : Header(0)) {
      SendRawWithFds(pair.a, std::string(1, byte), one);
    }
    ExpectError(Receive(pair.b).status(), absl::StatusCode::kInvalidArgument,
                "more fds than a frame may carry: 4");

    pair = UnixPair();  // an fd after the header
    SendRaw(pair.a, Header(1));
    SendRawWithFds(pair.a, "x", one);
    ExpectError(Receive(pair.b).status(), absl::StatusCode::kInvalidArgument,
                "beside its payload");

    pair = UnixPair();  // an fd with a frame that is refused for another reason
    SendRawWithFds(pair.a, "garbage!", one);
    EXPECT_FALSE(Receive(pair.b).ok());

    pair = UnixPair();  // an fd with a frame that never ends
    SendRawWithFds(pair.a, Header(10), one);
    pair.a.reset();
    EXPECT_FALSE(Receive(pair.b).ok());
  }
  EXPECT_EQ(OpenFdCount(), before);
}

TEST(FrameTest, NotASocket) {
  const UniqueFd file = FileWith("file");
  EXPECT_FALSE(SendFrame(file.get(), "x", {}, Later()).ok());
  EXPECT_FALSE(Receive(file).ok());
  EXPECT_FALSE(Receive(UniqueFd()).ok());
}

}  // namespace
}  // namespace optstate::shm
