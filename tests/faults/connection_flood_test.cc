// Hundreds of connections that want nothing good, while a job is stepping.

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/endpoint.h"
#include "gtest/gtest.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "tests/crash/poll_until.h"
#include "tests/faults/fault_fixture.h"
#include "tests/faults/process_state.h"

namespace optstate::faults {
namespace {

using client::Session;

constexpr size_t kThreads = 8;
constexpr size_t kConnectionsPerThread = 64;
constexpr absl::string_view kHttp2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

using Connections = std::vector<UniqueFd>;

// Returns a Hello as it looks on the wire.
std::string HelloBytes() {
  v1::Hello hello;
  hello.set_protocol_version_min(shm::kProtocolVersion);
  hello.set_protocol_version_max(shm::kProtocolVersion);
  hello.set_wire(v1::WIRE_SHM);
  hello.set_job("job");
  std::string frame(shm::kFrameMagic, sizeof(shm::kFrameMagic));
  const std::string payload = hello.SerializeAsString();
  frame.push_back(static_cast<char>(payload.size()));
  frame.append(3, '\0');
  return frame + payload;
}

class ConnectionFloodTest : public WireFaultTest {
 protected:
  void SetUp() override {
    WireFaultTest::SetUp();
    // No connection is let off for being slow, so that limits alone end
    // anything.
    StartDaemon({.tcp = false,
                 .flags = {},
                 .config = "limits:\n"
                           "  sessions_max: 128\n"
                           "  handshake_timeout_ms: 600000\n"});
  }

  // Connects from many threads; each connection says so much and no more.
  Connections Flood(const std::vector<std::string>& openings) const {
    client::Endpoint endpoint;
    endpoint.kind = client::Endpoint::Kind::kShm;
    endpoint.path = daemon_->socket();
    std::vector<Connections> of_thread(kThreads);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        const std::string& opening = openings[i % openings.size()];
        for (size_t j = 0; j < kConnectionsPerThread; ++j) {
          auto fd = client::Dial(endpoint, absl::Now() + absl::Minutes(1));
          ASSERT_TRUE(fd.ok()) << fd.status();
          // A connection that was refused already cannot be written to.
          send(fd->get(), opening.data(), opening.size(), MSG_NOSIGNAL);
          of_thread[i].push_back(*std::move(fd));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    Connections all;
    for (Connections& some : of_thread) {
      for (UniqueFd& fd : some) all.push_back(std::move(fd));
    }
    return all;
  }

  // Waits until the daemon has answered some of them, and counts its refusals
  // for want of room.
  static size_t CountRefused(const Connections& connections, size_t expected) {
    size_t refused = 0;
    std::vector<bool> answered(connections.size());
    const absl::Status status = crash::PollUntil("refusals", [&] {
      for (size_t i = 0; i < connections.size(); ++i) {
        pollfd entry = {
            .fd = connections[i].get(), .events = POLLIN, .revents = 0};
        if (answered[i] || poll(&entry, 1, 0) != 1) continue;
        answered[i] = true;
        if (IsRefusal(connections[i].get())) ++refused;
      }
      return refused >= expected;
    });
    EXPECT_TRUE(status.ok()) << status << ": " << refused << " of " << expected;
    return refused;
  }

  static bool IsRefusal(int fd) {
    const auto frame = shm::ReceiveFrame(fd, shm::kHelloBytesMax,
                                         absl::Now() + absl::Minutes(1));
    v1::HelloReply reply;
    return frame.ok() && reply.ParseFromString(frame->payload) &&
           reply.status().code() ==
               static_cast<int>(absl::StatusCode::kResourceExhausted);
  }

  void AwaitFds(size_t supervisor_fds, size_t engine_fds) const {
    const absl::Status status = crash::PollUntil("fewer fds", [&] {
      return OpenFds(daemon_->process().pid()) <= supervisor_fds &&
             OpenFds(engine()) <= engine_fds;
    });
    EXPECT_TRUE(status.ok())
        << status << ": " << OpenFds(daemon_->process().pid()) << " of "
        << supervisor_fds << ", " << OpenFds(engine()) << " of " << engine_fds;
  }

  void TryToAttachAsTheSameRank() const {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        const absl::Status status = Session::Open(Options()).status();
        EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
        EXPECT_EQ(RankProcess::Start({.endpoint = endpoint(),
                                      .daemon_path = "",
                                      .job = "job",
                                      .rank = 0,
                                      .world_size = 1,
                                      .seed = seed_})
                      .status()
                      .code(),
                  absl::StatusCode::kAlreadyExists);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST_P(ConnectionFloodTest, JobStepsOn) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  RunSteps(*session, 1, 1);
  const size_t supervisor_fds = OpenFds(daemon_->process().pid());
  const size_t engine_fds = OpenFds(engine());
  const std::string hello = HelloBytes();
  std::atomic<bool> over{false};
  std::thread flood([&] {
    // The 512 connections are of one user, who may have 256 that have not said
    // what they want.
    CountRefused(Flood({"", "OP", hello.substr(0, hello.size() / 2)}), 256);
    AwaitFds(supervisor_fds, engine_fds);
    CountRefused(Flood({hello}), kThreads * kConnectionsPerThread - 128);
    AwaitFds(supervisor_fds, engine_fds);
    Flood({std::string(kHttp2)});
    AwaitFds(supervisor_fds, engine_fds);
    TryToAttachAsTheSameRank();
    AwaitFds(supervisor_fds, engine_fds);
    over.store(true);
  });
  uint64_t step = 1;
  while (!over.load()) {
    ++step;
    RunSteps(*session, step, step);
    if (HasFatalFailure()) break;
  }
  flood.join();
  ExpectUndisturbed(*session, step);
}

INSTANTIATE_TEST_SUITE_P(Wires, ConnectionFloodTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate::faults
