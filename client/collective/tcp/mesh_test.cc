// Tests an exchange with a peer whose every byte the test writes.

#include "client/collective/tcp/mesh.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Minutes(2);

// Rank 0 of three, with the other ends of its sockets.
class MeshTest : public testing::Test {
 protected:
  void SetUp() override {
    std::vector<UniqueFd> sockets(3);
    for (uint32_t rank = 1; rank < 3; ++rank) {
      int ends[2];
      ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
      ASSERT_EQ(fcntl(ends[0], F_SETFL, O_NONBLOCK), 0);
      sockets[rank].reset(ends[0]);
      peers_[rank].reset(ends[1]);
    }
    auto mesh = Mesh::Make(0, std::move(sockets));
    ASSERT_TRUE(mesh.ok()) << mesh.status();
    mesh_ = *std::move(mesh);
  }

  static Frame OperationOf(uint32_t from) {
    return {.operation = Operation::kAllGather,
            .type = ElementType::kUint8,
            .from = from,
            .root = 0,
            .sequence = 1,
            .exchange = 0,
            .count = 4,
            .payload_bytes = 4};
  }

  void Write(uint32_t rank, absl::Span<const std::byte> bytes) {
    ASSERT_EQ(write(peers_[rank].get(), bytes.data(), bytes.size()),
              static_cast<ssize_t>(bytes.size()));
  }
  void Write(uint32_t rank, absl::string_view text) {
    Write(rank,
          absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()),
                              text.size()));
  }
  // Writes what the peer is expected to send.
  void WriteWhole(uint32_t rank) {
    Write(rank, Encode(OperationOf(rank)));
    Write(rank, "data");
  }
  void WriteAbort(uint32_t rank, absl::string_view text) {
    Write(rank, Encode({.operation = Operation::kAbort,
                        .type = ElementType::kUint8,
                        .from = rank,
                        .root = rank,
                        .sequence = 1,
                        .exchange = 0,
                        .count = 0,
                        .payload_bytes = text.size()}));
    Write(rank, text);
    ASSERT_EQ(shutdown(peers_[rank].get(), SHUT_WR), 0);
  }

  // Sends sent_ to each peer, and receives 4 bytes from each.
  absl::Status Exchange(absl::Duration timeout = kPatience) {
    received_[1] = received_[2] = std::string(4, '?');
    std::vector<PeerPayloads> payloads(3);
    for (uint32_t rank = 1; rank < 3; ++rank) {
      payloads[rank] = {
          .send = absl::MakeConstSpan(
              reinterpret_cast<const std::byte*>(sent_.data()), sent_.size()),
          .receive = absl::MakeSpan(
              reinterpret_cast<std::byte*>(received_[rank].data()), 4)};
    }
    return mesh_->Exchange(OperationOf(0), payloads, absl::Now() + timeout);
  }

  std::string Read(uint32_t rank, size_t size) {
    std::string text(size, '\0');
    const ssize_t count = recv(peers_[rank].get(), text.data(), size, 0);
    text.resize(count < 0 ? 0 : static_cast<size_t>(count));
    return text;
  }

  // Reads all that the mesh has sent, which has left, and returns the text of
  // the abort at its end; `root`: the rank that failed first.
  std::string ReadAbortTo(uint32_t rank, size_t text_bytes, uint32_t root) {
    std::string all;
    for (std::string part = Read(rank, 4096); !part.empty();
         part = Read(rank, 4096)) {
      all += part;
    }
    if (all.size() < Frame::kBytes + text_bytes) return "nothing was sent";
    const std::string abort =
        all.substr(all.size() - text_bytes - Frame::kBytes);
    const absl::StatusOr<Frame> frame = Decode(absl::MakeConstSpan(
        reinterpret_cast<const std::byte*>(abort.data()), Frame::kBytes));
    EXPECT_TRUE(frame.ok()) << frame.status();
    if (!frame.ok()) return "no frame";
    EXPECT_EQ(frame->operation, Operation::kAbort);
    EXPECT_EQ(frame->from, 0u);
    EXPECT_EQ(frame->root, root);
    EXPECT_EQ(frame->payload_bytes, text_bytes);
    return abort.substr(Frame::kBytes);
  }

  UniqueFd peers_[3];
  std::string sent_ = "mine";
  std::string received_[3];
  std::unique_ptr<Mesh> mesh_;
};

TEST_F(MeshTest, ExchangesWithAll) {
  WriteWhole(1);
  WriteWhole(2);
  const absl::Status status = Exchange();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(received_[1], "data");
  EXPECT_EQ(received_[2], "data");
  const std::string bytes = Read(2, Frame::kBytes + 4);
  ASSERT_EQ(bytes.size(), Frame::kBytes + 4);
  EXPECT_EQ(bytes.substr(Frame::kBytes), "mine");
}

TEST_F(MeshTest, NextFramesWait) {
  WriteWhole(1);
  WriteWhole(1);
  WriteWhole(2);
  ASSERT_TRUE(Exchange().ok());
  WriteWhole(2);
  ASSERT_TRUE(Exchange().ok());
}

TEST_F(MeshTest, BytesThatAreNoFrame) {
  Write(1, std::string(Frame::kBytes, 'x'));
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

TEST_F(MeshTest, AFrameInAnothersName) {
  Write(1, Encode(OperationOf(2)));
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
}

// A length that would write beyond the buffer is refused before it is read.
TEST_F(MeshTest, ALongerPayload) {
  Frame frame = OperationOf(1);
  frame.payload_bytes = uint64_t{1} << 60;
  Write(1, Encode(frame));
  Write(1, std::string(100, 'x'));
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(received_[1], "????");
}

TEST_F(MeshTest, APeerThatEnds) {
  WriteWhole(2);
  peers_[1].reset();
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

TEST_F(MeshTest, APeerThatEndsWithinItsFrame) {
  WriteWhole(2);
  Write(1, Encode(OperationOf(1)));
  Write(1, "da");
  ASSERT_EQ(shutdown(peers_[1].get(), SHUT_WR), 0);
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
}

// A peer that has taken part and is done does not disturb the others.
TEST_F(MeshTest, APeerThatEndsAfterItsFrame) {
  WriteWhole(1);
  ASSERT_EQ(shutdown(peers_[1].get(), SHUT_WR), 0);
  WriteWhole(2);
  EXPECT_TRUE(Exchange().ok());
  WriteWhole(2);
  EXPECT_TRUE(absl::IsUnavailable(Exchange()));
}

TEST_F(MeshTest, AnAbortInTheFramesPlace) {
  WriteAbort(1, "out of memory\n");
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 1 has failed: out of memory?"));
}

// Rank 2 is not awaited to learn that rank 1 has failed.
TEST_F(MeshTest, AnAbortBehindTheFrame) {
  WriteWhole(1);
  WriteAbort(1, "out of memory");
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
}

// A peer that has failed reads no more, so that a large payload to it is never
// sent; its abort is heard all the same.
TEST_F(MeshTest, AnAbortWhileThisRankStillSends) {
  sent_.assign(size_t{8} << 20, 'm');
  WriteWhole(1);
  WriteWhole(2);
  WriteAbort(1, "out of memory");
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 1 has failed: out of memory"));
}

TEST_F(MeshTest, APeerThatEndsWhileThisRankStillSends) {
  sent_.assign(size_t{8} << 20, 'm');
  WriteWhole(1);
  WriteWhole(2);
  ASSERT_EQ(shutdown(peers_[1].get(), SHUT_WR), 0);
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

TEST_F(MeshTest, AnAbortThatLies) {
  Write(1, Encode({.operation = Operation::kAbort,
                   .type = ElementType::kUint8,
                   .from = 1,
                   .root = 4'000'000'000,
                   .sequence = 1,
                   .exchange = 0,
                   .count = 0,
                   .payload_bytes = uint64_t{1} << 63}));
  ASSERT_EQ(shutdown(peers_[1].get(), SHUT_WR), 0);
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 has failed"));
}

TEST_F(MeshTest, ATimeOutNamesWhoIsMissing) {
  WriteWhole(1);
  const absl::Status status = Exchange(absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("for ranks 2,"));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("all_gather of 4 uint8 (operation 1)"));
}

TEST_F(MeshTest, LeavingTellsThePeers) {
  WriteWhole(1);
  const absl::Status status = Exchange(absl::Milliseconds(50));
  ASSERT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  mesh_->Leave(status);
  const std::string text =
      "DEADLINE_EXCEEDED: " + std::string(status.message());
  for (uint32_t rank = 1; rank < 3; ++rank) {
    EXPECT_EQ(ReadAbortTo(rank, text.size(), /*root=*/0), text);
  }
}

// Each rank hears the text of the rank that failed first.
TEST_F(MeshTest, AnAbortIsPassedOnAsItIs) {
  const std::string text = "out of memory";
  WriteAbort(1, text);
  const absl::Status status = Exchange();
  ASSERT_TRUE(absl::IsAborted(status)) << status;
  mesh_->Leave(status);
  EXPECT_EQ(ReadAbortTo(2, text.size(), /*root=*/1), text);
}

TEST_F(MeshTest, WakeEndsTheExchange) {
  mesh_->Wake();
  const absl::Status status = Exchange();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
}

}  // namespace
}  // namespace optstate::client
