// Tests what is counted of sessions over shared memory: refused requests, and
// what waits in their rings.

#include <sched.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "proto/shm/segment_layout.h"
#include "server/transport/shm/shm_fixture.h"

namespace optstate::transport {
namespace {

class ShmCountersTest : public ShmFixture {
 protected:
  v1::WireBytes Described() const {
    v1::Job job;
    wires_.Describe(&job);
    return job.wires_size() == 0 ? v1::WireBytes() : job.wires(0);
  }
  uint64_t Refused(absl::string_view code) const {
    const v1::WireBytes wire = Described();
    for (const v1::RefusedRequests& each : wire.refused()) {
      if (each.code() == code) return each.requests();
    }
    return 0;
  }
  // Waits until so much waits in the rings; false: it never did.
  bool AwaitQueues(uint64_t requests, uint64_t replies) const {
    const absl::Time deadline = absl::Now() + absl::Minutes(2);
    while (absl::Now() < deadline) {
      const v1::WireBytes wire = Described();
      if (wire.requests_waiting() == requests &&
          wire.replies_waiting() == replies) {
        return true;
      }
      sched_yield();
    }
    return false;
  }
  // Returns a push that is refused with INVALID_ARGUMENT.
  static shm::Submission WrongPush(const ShmTestPeer& peer) {
    shm::Submission wrong = peer.Push(1);
    wrong.numel = uint64_t{1} << 32;
    return wrong;
  }
};

TEST_F(ShmCountersTest, RefusedRequestsAreCounted) {
  auto peer = Open(0);
  EXPECT_EQ(Described().refused_size(), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(WrongPush(*peer)).status));
  EXPECT_EQ(Refused("invalid_argument"), 1u);
  // The frames of the handshake have answers too.
  auto hasty = Connect(1);
  ASSERT_TRUE(hasty->Send(hasty->AttachRequest()).ok());
  const auto reply = hasty->Receive();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->status().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(Refused("failed_precondition"), 1u);
  EXPECT_EQ(Refused("invalid_argument"), 1u);
}

TEST_F(ShmCountersTest, ASessionThatEndsWithAnErrorIsCounted) {
  auto peer = Open(0);
  shm::Submission unknown = peer->Push(1);
  unknown.op = 99;
  peer->Submit(unknown);
  EXPECT_TRUE(absl::IsInvalidArgument(peer->AwaitEnd()));
  EXPECT_EQ(Refused("invalid_argument"), 1u);
}

// A rank that reads no answers has none of its further requests taken.
TEST_F(ShmCountersTest, WhatWaitsInTheRingsIsCounted) {
  auto peer = Open(0);
  EXPECT_TRUE(AwaitQueues(0, 0));
  const shm::Submission wrong = WrongPush(*peer);
  for (uint64_t i = 0; i < shm::kRingEntries; ++i) peer->Submit(wrong);
  ASSERT_TRUE(AwaitQueues(0, shm::kRingEntries));
  for (int i = 0; i < 5; ++i) peer->Submit(wrong);
  EXPECT_EQ(Described().requests_waiting(), 5u);
  EXPECT_EQ(Described().replies_waiting(), uint64_t{shm::kRingEntries});
  for (uint64_t i = 0; i < shm::kRingEntries + 5; ++i) peer->Await();
  EXPECT_TRUE(AwaitQueues(0, 0));
  // The session that is over has no queues, and those of the next one count.
  peer.reset();
  auto next = Open(0);
  next->Submit(WrongPush(*next));
  EXPECT_TRUE(AwaitQueues(0, 1));
}

}  // namespace
}  // namespace optstate::transport
