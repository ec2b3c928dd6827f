#include "server/engine/work_reporter.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/engine/control_socket.h"
#include "server/engine/supervisor_link.h"

namespace optstate::engine {
namespace {

// The engine's end of the link, and supervisors that connect to it.
class WorkReporterTest : public testing::Test {
 protected:
  WorkReporterTest() : job_dir_("/tmp/work-reporter-XXXXXX") {
    EXPECT_NE(::mkdtemp(job_dir_.data()), nullptr);
    auto listener = ListenForSupervisor(job_dir_);
    EXPECT_TRUE(listener.ok()) << listener.status();
    auto link = SupervisorLink::Start(*std::move(listener),
                                      /*ends_with_supervisor=*/false);
    EXPECT_TRUE(link.ok()) << link.status();
    link_ = *std::move(link);
  }
  ~WorkReporterTest() override { std::filesystem::remove_all(job_dir_); }

  // Connects as a supervisor does, and introduces itself.
  UniqueFd Supervise() const {
    auto connection = ConnectToEngine(job_dir_);
    EXPECT_TRUE(connection.ok()) << connection.status();
    v1::SupervisorRequest request;
    request.mutable_supervise()->set_log_level("info");
    const UniqueFd fd(::open("/dev/null", O_RDWR | O_CLOEXEC));
    EXPECT_EQ(
        SendPacket(connection->get(), request.SerializeAsString(), fd.get()),
        0);
    return *std::move(connection);
  }
  // Waits for the bytes that the next event reports; 0: the link has ended.
  static uint64_t AwaitWork(const UniqueFd& supervisor) {
    while (true) {
      pollfd readable{supervisor.get(), POLLIN, 0};
      ::poll(&readable, 1, -1);
      auto packet = ReceivePacket(supervisor.get());
      if (!packet.ok()) return 0;
      if (!packet->has_value()) continue;
      v1::EngineEvent event;
      EXPECT_TRUE(event.ParseFromString((*packet)->bytes));
      return event.working().disk_bytes();
    }
  }
  bool IsReadable() const {
    pollfd readable{link_->fd(), POLLIN, 0};
    return ::poll(&readable, 1, 0) == 1;
  }

  std::string job_dir_;
  std::unique_ptr<SupervisorLink> link_;
  std::atomic<uint64_t> disk_bytes_ = 0;
};

// The second supervisor comes while the engine opens the job.
TEST_F(WorkReporterTest, TheNextSupervisorIsToldOfWorkToo) {
  UniqueFd first = Supervise();
  ASSERT_TRUE(link_->Receive().has_value());
  UniqueFd second;
  {
    const WorkReporter working(link_.get(), &disk_bytes_);
    disk_bytes_ = 1000;
    EXPECT_EQ(AwaitWork(first), 1000u);
    first.reset();
    second = Supervise();
    // The supervisor is told as soon as it is accepted and more was read.
    std::optional<uint64_t> told;
    while (!told.has_value()) {
      ++disk_bytes_;
      pollfd readable{second.get(), POLLIN, 0};
      if (::poll(&readable, 1, 100) == 1) told = AwaitWork(second);
    }
    EXPECT_GT(*told, 1000u);
  }
  // The report that was sent meanwhile is received now.
  EXPECT_TRUE(IsReadable());
  const auto message = link_->Receive();
  ASSERT_TRUE(message.has_value());
  EXPECT_TRUE(message->request.has_supervise());
  EXPECT_TRUE(message->fd.ok());
  EXPECT_FALSE(link_->Receive().has_value());
  EXPECT_FALSE(IsReadable());
}

}  // namespace
}  // namespace optstate::engine
