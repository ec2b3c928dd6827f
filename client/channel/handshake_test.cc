// Tests a client whose peer is not a daemon, or one of another version.

#include "client/channel/handshake.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "client/channel/transport_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/frame.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

// Accepts one connection and lets `peer` handle it.
class FakePeer {
 public:
  explicit FakePeer(std::function<void(int)> peer) {
    // The path is not below TEST_TMPDIR, which is too long for a socket.
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    path_ = directory_ + "/sock";
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address),
                   sizeof(address)),
              0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    thread_ = std::thread([peer = std::move(peer), fd = std::move(listener)]() {
      const UniqueFd connection(accept(fd.get(), nullptr, nullptr));
      peer(connection.get());
    });
  }
  ~FakePeer() {
    thread_.join();
    unlink(path_.c_str());
    rmdir(directory_.c_str());
  }

  absl::StatusOr<UniqueFd> Connect(
      const InterruptCheck& interrupted = {},
      const std::optional<AccessOptions>& access = std::nullopt) {
    return OpenConnection(*ParseEndpoint("unix:" + path_), v1::WIRE_SHM, "job",
                          /*must_exist=*/false, /*two_phase=*/false, Soon(),
                          interrupted, access);
  }

 private:
  std::string directory_ = "/tmp/optstate-peer-XXXXXX";
  std::string path_;
  std::thread thread_;
};

void Reply(int connection, const v1::HelloReply& reply) {
  EXPECT_TRUE(shm::ReceiveFrame(connection, shm::kHelloBytesMax, Soon()).ok());
  EXPECT_TRUE(
      shm::SendFrame(connection, reply.SerializeAsString(), {}, Soon()).ok());
}

TEST(HandshakeTest, SaysWhoItIs) {
  FakePeer peer([](int connection) {
    const auto frame =
        shm::ReceiveFrame(connection, shm::kHelloBytesMax, Soon());
    ASSERT_TRUE(frame.ok()) << frame.status();
    v1::Hello hello;
    ASSERT_TRUE(hello.ParseFromString(frame->payload));
    EXPECT_EQ(hello.job(), "job");
    EXPECT_EQ(hello.wire(), v1::WIRE_SHM);
    EXPECT_EQ(hello.pid(), getpid());
    EXPECT_EQ(hello.protocol_version_max(), shm::kProtocolVersion);
    EXPECT_FALSE(hello.must_exist());
    EXPECT_FALSE(hello.has_access());
    v1::HelloReply reply;
    reply.set_protocol_version(shm::kProtocolVersion);
    EXPECT_TRUE(
        shm::SendFrame(connection, reply.SerializeAsString(), {}, Soon()).ok());
  });
  const auto socket = peer.Connect();
  EXPECT_TRUE(socket.ok()) << socket.status();
}

TEST(HandshakeTest, SaysWhoMayUseTheJob) {
  FakePeer peer([](int connection) {
    const auto frame =
        shm::ReceiveFrame(connection, shm::kHelloBytesMax, Soon());
    ASSERT_TRUE(frame.ok()) << frame.status();
    v1::Hello hello;
    ASSERT_TRUE(hello.ParseFromString(frame->payload));
    EXPECT_EQ(hello.access().group(), "research");
    EXPECT_TRUE(hello.access().is_private());
    EXPECT_THAT(hello.access().readers(),
                testing::ElementsAre("alice", "@ops"));
    v1::HelloReply reply;
    reply.set_protocol_version(shm::kProtocolVersion);
    EXPECT_TRUE(
        shm::SendFrame(connection, reply.SerializeAsString(), {}, Soon()).ok());
  });
  const auto socket = peer.Connect(
      /*interrupted=*/{}, AccessOptions{.group = "research",
                                        .is_private = true,
                                        .readers = {"alice", "@ops"}});
  EXPECT_TRUE(socket.ok()) << socket.status();
}

TEST(HandshakeTest, AnotherProtocolVersionIsNotTriedAgain) {
  v1::HelloReply reply;
  reply.set_protocol_version(shm::kProtocolVersion + 1);
  reply.set_server_version("9.0");
  FakePeer peer([&](int connection) { Reply(connection, reply); });
  const absl::Status status = peer.Connect().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(IsTransportError(status));
  EXPECT_THAT(status.message(), HasSubstr("9.0"));
}

TEST(HandshakeTest, RefusalsArePassedOn) {
  v1::HelloReply reply;
  reply.mutable_status()->set_code(
      static_cast<int>(absl::StatusCode::kPermissionDenied));
  reply.mutable_status()->set_message("belongs to uid 7");
  FakePeer peer([&](int connection) { Reply(connection, reply); });
  const absl::Status status = peer.Connect().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("belongs to uid 7"));
  EXPECT_FALSE(IsTransportError(status));
}

// A rank does not wait for it: its user wakes the job, or starts it again.
TEST(HandshakeTest, AJobThatSleepsOrIsOnItsWayIsAnAnswer) {
  const std::pair<absl::StatusCode, const char*> kAnswers[] = {
      {absl::StatusCode::kFailedPrecondition,
       "job \"x\" is asleep, in /disk/x: `optctl wake x` wakes it"},
      {absl::StatusCode::kUnavailable,
       "job \"x\" is being put to sleep: 1 of 2 MiB; when it is asleep, "
       "`optctl wake x` wakes it"},
      {absl::StatusCode::kUnavailable,
       "job \"x\" is being woken: 1 of 2 MiB; start the rank again when "
       "`optctl get jobs` shows it awake"}};
  for (const auto& [code, text] : kAnswers) {
    v1::HelloReply reply;
    reply.mutable_status()->set_code(static_cast<int>(code));
    reply.mutable_status()->set_message(text);
    FakePeer peer([&](int connection) { Reply(connection, reply); });
    const absl::Status status = peer.Connect().status();
    EXPECT_EQ(status.code(), code);
    EXPECT_THAT(status.message(), HasSubstr(text));
    EXPECT_FALSE(IsTransportError(status));
  }
}

TEST(HandshakeTest, DrainingIsAnAnswerAndConnectAgainIsNone) {
  for (const bool again : {false, true}) {
    v1::HelloReply reply;
    reply.mutable_status()->set_code(
        static_cast<int>(absl::StatusCode::kUnavailable));
    reply.mutable_status()->set_message(
        again ? "job x has just ended; connect again" : "draining");
    FakePeer peer([&](int connection) { Reply(connection, reply); });
    EXPECT_EQ(IsTransportError(peer.Connect().status()), again);
  }
}

TEST(HandshakeTest, AHangUpIsATransportError) {
  FakePeer peer([](int connection) {
    EXPECT_TRUE(
        shm::ReceiveFrame(connection, shm::kHelloBytesMax, Soon()).ok());
  });
  const absl::Status status = peer.Connect().status();
  EXPECT_TRUE(IsTransportError(status)) << status;
  EXPECT_FALSE(IsUnreachable(status));
}

TEST(HandshakeTest, AnotherProgramIsNoTransportError) {
  FakePeer peer([](int connection) {
    EXPECT_TRUE(
        shm::ReceiveFrame(connection, shm::kHelloBytesMax, Soon()).ok());
    const char text[] = "HTTP/1.1 400 Bad Request\r\n";
    EXPECT_GT(write(connection, text, sizeof(text)), 0);
  });
  const absl::Status status = peer.Connect().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(IsTransportError(status));
}

TEST(HandshakeTest, AnInterruptEndsTheWaitForAnAnswer) {
  FakePeer peer([](int connection) {
    EXPECT_TRUE(
        shm::ReceiveFrame(connection, shm::kHelloBytesMax, Soon()).ok());
    // This peer sends nothing until the other side hangs up.
    EXPECT_FALSE(
        shm::ReceiveFrame(connection, shm::kHelloBytesMax, Soon()).ok());
  });
  int asked = 0;
  const absl::Status status =
      peer.Connect([&] { return ++asked == 3; }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(IsTransportError(status));
}

TEST(HandshakeTest, AnAbsentDaemonIsUnreachable) {
  const absl::Status status =
      OpenConnection(*ParseEndpoint("unix:/nonexistent/x"), v1::WIRE_SHM, "job",
                     /*must_exist=*/false, /*two_phase=*/false, Soon(), {})
          .status();
  EXPECT_TRUE(IsUnreachable(status)) << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("/nonexistent/x"));
  EXPECT_THAT(status.message(), HasSubstr("start optstated"));
}

TEST(HandshakeTest, ADaemonThatDoesNotKnowFetchedParametersIsRefused) {
  ChannelSetup setup;
  setup.fetches_parameters = true;
  v1::AttachReply reply;
  const absl::Status refused = CheckFetches(setup, reply);
  EXPECT_TRUE(absl::IsUnimplemented(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("upgrade it"));
  reply.set_parameters_are_fetched(true);
  EXPECT_TRUE(CheckFetches(setup, reply).ok());
  setup.fetches_parameters = false;
  EXPECT_TRUE(CheckFetches(setup, v1::AttachReply()).ok());
}

TEST(HandshakeTest, ADaemonThatKeepsParametersInMemoryIsTooOld) {
  ChannelSetup setup;
  setup.fetches_parameters = true;
  setup.storage.placement = Placement::kNvme;
  setup.storage.parameters_on_disk = true;
  v1::RegisterReply registered;
  registered.set_layout_hash(setup.layout.hash());
  v1::AttachReply attached;
  attached.set_parameters_are_fetched(true);
  registered.mutable_storage()->set_placement(v1::PLACEMENT_NVME);
  EXPECT_TRUE(absl::IsUnimplemented(
      MakeAttached(setup, registered, attached).status()));
  registered.mutable_storage()->set_parameters_on_disk(true);
  EXPECT_TRUE(MakeAttached(setup, registered, attached).ok());
  registered.mutable_storage()->Clear();  // "auto" that fits in memory
  registered.mutable_storage()->set_placement(v1::PLACEMENT_HOST);
  EXPECT_TRUE(MakeAttached(setup, registered, attached).ok());
}

TEST(HandshakeTest, ADaemonThatUpdatesNothingOnDevicesIsTooOld) {
  ChannelSetup setup;
  setup.storage.offload_fraction = 0.5;
  v1::RegisterReply registered;
  registered.set_layout_hash(setup.layout.hash());
  registered.mutable_storage()->set_placement(v1::PLACEMENT_HOST);
  v1::AttachReply attached;
  EXPECT_TRUE(absl::IsUnimplemented(
      MakeAttached(setup, registered, attached).status()));
  setup.storage.offload_fraction = 1;
  EXPECT_TRUE(MakeAttached(setup, registered, attached).ok());
  // An operator may have changed it since.
  setup.storage.offload_fraction = 0.5;
  registered.mutable_storage()->set_offload_fraction(0.25);
  EXPECT_TRUE(MakeAttached(setup, registered, attached).ok());
}

TEST(HandshakeTest, ADaemonThatKeepsNothingOnDevicesIsTooOld) {
  ChannelSetup setup;
  setup.storage.offload_fraction = 0.5;
  setup.storage.device_budget_bytes = 1 << 20;
  v1::RegisterReply registered;
  registered.set_layout_hash(setup.layout.hash());
  registered.mutable_storage()->set_placement(v1::PLACEMENT_HOST);
  registered.mutable_storage()->set_offload_fraction(0.5);
  v1::AttachReply attached;
  EXPECT_TRUE(absl::IsUnimplemented(
      MakeAttached(setup, registered, attached).status()));
  registered.mutable_storage()->set_device_budget_bytes(1 << 20);
  EXPECT_TRUE(MakeAttached(setup, registered, attached).ok());
  // An operator may have changed it since, and turned it off.
  registered.mutable_storage()->set_device_budget_bytes(2 << 20);
  EXPECT_TRUE(MakeAttached(setup, registered, attached).ok());
  registered.mutable_storage()->mutable_made_with()->set_device_budget_bytes(
      1 << 20);
  registered.mutable_storage()->clear_device_budget_bytes();
  EXPECT_TRUE(MakeAttached(setup, registered, attached).ok());
}

}  // namespace
}  // namespace optstate::client
