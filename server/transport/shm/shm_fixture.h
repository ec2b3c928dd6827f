#ifndef OPTSTATE_SERVER_TRANSPORT_SHM_SHM_FIXTURE_H_
#define OPTSTATE_SERVER_TRANSPORT_SHM_SHM_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "proto/shm/frame.h"
#include "proto/types/unique_fd.h"
#include "server/session/wire_counters.h"
#include "server/transport/fake_job.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/session_table.h"
#include "server/transport/shm/shm_test_peer.h"
#include "server/transport/shm/shm_transport.h"
#include "server/transport/test_layout.h"

namespace optstate::transport {

// A fixture with a transport over a FakeJob of two ranks.
class ShmFixture : public testing::Test {
 protected:
  void SetUp() override { StartTransport(absl::Minutes(2)); }

  void StartTransport(absl::Duration handshake_timeout) {
    transport_.reset();
    watcher_ = FdWatcher::Start().value();
    v1::EngineSettings settings;
    settings.set_doorbell_spin_us(20);
    transport_ = std::make_unique<ShmTransport>(
        ShmTransport::Options{.job = &job_,
                              .table = &table_,
                              .watcher = watcher_.get(),
                              .settings = settings,
                              .handshake_timeout = handshake_timeout});
  }

  void Serve(UniqueFd socket, int64_t pid,
             uint32_t protocol_version = shm::kProtocolVersion) {
    Peer peer;
    peer.hello.set_job("test");
    peer.hello.set_protocol_version_min(protocol_version);
    peer.hello.set_protocol_version_max(protocol_version);
    peer.hello.set_client_version("1");
    peer.pid = pid;
    transport_->Serve(std::move(socket), std::move(peer));
  }

  // Opens a connection that has said Hello.
  std::unique_ptr<ShmTestPeer> Connect(
      uint32_t rank, uint32_t protocol_version = shm::kProtocolVersion) {
    SocketPair sockets = MakeSocketPair();
    Serve(std::move(sockets.engine), 0, protocol_version);
    return std::make_unique<ShmTestPeer>(
        std::move(sockets.client), TestLayout(), 2, rank, protocol_version);
  }

  std::unique_ptr<ShmTestPeer> Open(uint32_t rank) {
    auto peer = Connect(rank);
    const absl::Status opened = peer->Open();
    EXPECT_TRUE(opened.ok()) << opened;
    return peer;
  }

  // Expects that another session still works, whatever became of the one under
  // test.
  void ExpectServes(uint32_t rank) {
    auto peer = Open(rank);
    EXPECT_TRUE(peer->Call(peer->Push(job_.committed_step() + 1)).status.ok());
  }

  FakeJob job_;
  session::WireCounters wires_;
  SessionTable table_{
      SessionTable::Observers{.on_lost = nullptr, .wires = &wires_}};
  std::unique_ptr<FdWatcher> watcher_;
  std::unique_ptr<ShmTransport> transport_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SHM_SHM_FIXTURE_H_
