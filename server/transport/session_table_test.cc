#include "server/transport/session_table.h"

#include <sys/socket.h>

#include <thread>

#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "proto/types/unique_fd.h"
#include "server/session/wire_counters.h"

namespace optstate::transport {
namespace {

class SessionTableTest : public testing::Test {
 protected:
  void SetUp() override {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ours_.reset(fds[0]);
    theirs_.reset(fds[1]);
  }

  UniqueFd ours_;
  UniqueFd theirs_;
  SessionTable table_;
};

TEST_F(SessionTableTest, RanksDoNotMeet) {
  PeerLink link(ours_.get(), 0);
  EXPECT_TRUE(table_.Claim(0, {.link = &link}, absl::ZeroDuration()).ok());
  EXPECT_TRUE(table_.Claim(1, {.link = &link}, absl::ZeroDuration()).ok());
  table_.Release(0);
  EXPECT_TRUE(table_.Claim(0, {.link = &link}, absl::ZeroDuration()).ok());
}

TEST_F(SessionTableTest, QueuesAreAskedForAsLongAsARankIsClaimed) {
  session::WireCounters wires;
  SessionTable table(
      SessionTable::Observers{.on_lost = nullptr, .wires = &wires});
  PeerLink link(ours_.get(), 0);
  const session::WireCounters::Queues queues = [] {
    return session::WireCounters::QueueLengths{.requests = 3, .replies = 4};
  };
  const session::WireCounters::Queues none = nullptr;
  const auto requests = [&wires] {
    v1::Job job;
    wires.Describe(&job);
    return job.wires_size() == 0 ? 0 : job.wires(0).requests_waiting();
  };
  ASSERT_TRUE(
      table.Claim(0, {.link = &link, .wire = "shm", .queues = &queues}, {})
          .ok());
  ASSERT_TRUE(
      table.Claim(1, {.link = &link, .wire = "shm", .queues = &none}, {}).ok());
  EXPECT_EQ(requests(), 3u);
  // Another one that wants the rank has none.
  EXPECT_FALSE(
      table.Claim(0, {.link = &link, .wire = "shm", .queues = &queues}, {})
          .ok());
  EXPECT_EQ(requests(), 3u);
  table.Release(0);
  EXPECT_EQ(requests(), 0u);
}

TEST_F(SessionTableTest, ALiveOwnerIsNamed) {
  PeerLink link(ours_.get(), 0);
  ASSERT_TRUE(
      table_.Claim(7, {.link = &link, .pid = 123, .wire = "shm"}, {}).ok());
  const absl::Status status =
      table_.Claim(7, {.link = &link, .pid = 124, .wire = "grpc"}, {});
  EXPECT_TRUE(absl::IsAlreadyExists(status));
  EXPECT_NE(status.message().find("rank 7"), absl::string_view::npos);
  EXPECT_NE(status.message().find("process 123"), absl::string_view::npos);
}

// After a network failure the old connection looks alive for minutes.
TEST_F(SessionTableTest, TheSameClientTakesItsRankBack) {
  PeerLink link(ours_.get(), 0);
  std::thread owner;
  const auto end = [&] { owner = std::thread([&] { table_.Release(0); }); };
  ASSERT_TRUE(
      table_
          .Claim(0, {.link = &link, .interrupt = end, .client_instance = 7}, {})
          .ok());
  for (const uint64_t other : {0, 8}) {
    EXPECT_TRUE(absl::IsAlreadyExists(
        table_.Claim(0, {.link = &link, .client_instance = other}, {})));
  }
  EXPECT_TRUE(
      table_.Claim(0, {.link = &link, .client_instance = 7}, absl::Minutes(2))
          .ok());
  owner.join();
}

TEST_F(SessionTableTest, ADeadOwnerIsInterruptedAndAwaited) {
  PeerLink dead(ours_.get(), 0);
  std::thread owner;
  ASSERT_TRUE(
      table_
          .Claim(0,
                 {.link = &dead,
                  .interrupt =
                      [&] { owner = std::thread([&] { table_.Release(0); }); }},
                 {})
          .ok());
  theirs_.reset();
  PeerLink link(ours_.get(), 0);
  EXPECT_TRUE(table_.Claim(0, {.link = &link}, absl::Minutes(2)).ok());
  owner.join();
}

TEST_F(SessionTableTest, AStepThatTakesTooLongIsUnavailable) {
  PeerLink dead(ours_.get(), 0);
  int interrupts = 0;
  ASSERT_TRUE(
      table_.Claim(0, {.link = &dead, .interrupt = [&] { ++interrupts; }}, {})
          .ok());
  theirs_.reset();
  EXPECT_TRUE(absl::IsUnavailable(table_.Claim(0, {.link = &dead}, {})));
  EXPECT_EQ(interrupts, 1);
}

}  // namespace
}  // namespace optstate::transport
