#include "server/transport/grpc/message_patience.h"

#include <sys/socket.h>

#include <string>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/transport/test_layout.h"

namespace optstate::transport {
namespace {

constexpr absl::Duration kPeriod = absl::Seconds(5);
constexpr uint64_t kEnough = MessagePatience::kBytesMin;
constexpr absl::Time kStart = absl::UnixEpoch();

TEST(MessagePatienceTest, LastsWhileBytesCome) {
  MessagePatience patience(100 * kPeriod);
  uint64_t received = 1000;
  patience.Begin(kStart, {.received_bytes = received});
  for (int look = 1; look < 100; ++look) {
    received += kEnough;
    EXPECT_TRUE(
        patience.Lasts(kStart + look * kPeriod, {.received_bytes = received}));
  }
  EXPECT_FALSE(patience.Lasts(kStart + 100 * kPeriod,
                              {.received_bytes = received + kEnough}))
      << "not for ever";
}

TEST(MessagePatienceTest, ASilentOrTricklingPeerHasOnePeriod) {
  MessagePatience patience;
  patience.Begin(kStart, {.received_bytes = kEnough});
  EXPECT_FALSE(patience.Lasts(kStart + kPeriod, {.received_bytes = kEnough}));
  patience.Begin(kStart, {});
  EXPECT_FALSE(
      patience.Lasts(kStart + kPeriod, {.received_bytes = kEnough - 1}));
  patience.Begin(kStart, {});
  EXPECT_TRUE(patience.Lasts(kStart + kPeriod, {.received_bytes = kEnough}));
  EXPECT_FALSE(
      patience.Lasts(kStart + 2 * kPeriod, {.received_bytes = kEnough}));
}

// Bytes that this side has not read yet do not make the peer late.
TEST(MessagePatienceTest, UnreadBytesCount) {
  MessagePatience patience;
  patience.Begin(kStart, {});
  EXPECT_TRUE(patience.Lasts(kStart + kPeriod, {.unread_bytes = kEnough}));
  EXPECT_FALSE(patience.Lasts(kStart + 2 * kPeriod, {}));
}

TEST(MessagePatienceTest, TheKernelCounts) {
  const std::string bytes(kEnough, 'x');
  const SocketPair tcp = MakeTcpPair();
  ASSERT_EQ(::send(tcp.client.get(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  std::string read(bytes.size(), '\0');
  ASSERT_EQ(::recv(tcp.engine.get(), read.data(), 1000, MSG_WAITALL), 1000);
  // The count includes all bytes that have arrived, read or unread.
  while (ArrivedOn(tcp.engine.get()).received_bytes < bytes.size()) {
  }
  EXPECT_EQ(ArrivedOn(tcp.engine.get()).received_bytes, bytes.size());
  EXPECT_EQ(ArrivedOn(tcp.engine.get()).unread_bytes, bytes.size() - 1000);

  const SocketPair local = MakeSocketPair();
  ASSERT_EQ(::send(local.client.get(), bytes.data(), 10, 0), 10);
  EXPECT_EQ(ArrivedOn(local.engine.get()).received_bytes, 0u);
  EXPECT_EQ(ArrivedOn(local.engine.get()).unread_bytes, 10u);
}

}  // namespace
}  // namespace optstate::transport
