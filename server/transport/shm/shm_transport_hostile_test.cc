// Tests peers that break the shared-memory protocol: each must get a clear
// error, harm no other session and leave nothing behind.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/futex.h"
#include "server/transport/shm/shm_fixture.h"

namespace optstate::transport {
namespace {

using testing::HasSubstr;

class ShmHostileTest : public ShmFixture {
 protected:
  void TearDown() override { ExpectServes(1); }

  // Attaches with a segment; returns the reply's status.
  absl::Status AttachWith(shm::SealedSegment segment) {
    auto peer = Connect(0);
    EXPECT_TRUE(peer->Register().ok());
    return peer->Attach(std::move(segment));
  }
  absl::Status AttachWith(
      const std::function<void(shm::ClientHeader*)>& change) {
    return AttachWith(Connect(0)->MakeSegment(change));
  }
  absl::Status AttachWithFds(absl::Span<const int> fds) {
    auto peer = Connect(0);
    EXPECT_TRUE(peer->Register().ok());
    EXPECT_TRUE(peer->Send(peer->AttachRequest(), fds).ok());
    auto reply = peer->Receive();
    EXPECT_TRUE(reply.ok());
    return absl::Status(static_cast<absl::StatusCode>(reply->status().code()),
                        reply->status().message());
  }
};

TEST_F(ShmHostileTest, SegmentOfAnotherSize) {
  auto small = shm::SealedSegment::Create("small", 4096).value();
  const absl::Status status = AttachWith(std::move(small));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("client segment"));
}

TEST_F(ShmHostileTest, SegmentNotSealed) {
  const uint64_t bytes = Connect(0)->MakeSegment().size();
  UniqueFd fd(::memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(AttachWithFds({fd.get()})));
}

// Without the promise that they follow, all pages are due at the attach, and
// with it all that hold no gradients.
TEST_F(ShmHostileTest, SegmentWithHoles) {
  const absl::Status without_promise =
      AttachWith(Connect(0)->MakeSegmentWithoutGradients());
  EXPECT_TRUE(absl::IsInvalidArgument(without_promise)) << without_promise;
  EXPECT_THAT(std::string(without_promise.message()), HasSubstr("holes"));
  auto peer = Connect(0);
  peer->pages_follow = true;
  ASSERT_TRUE(peer->Register().ok());
  const absl::Status without_window = peer->Attach(
      peer->MakeSegment(nullptr, shm::SealedSegment::Pages::kNone));
  EXPECT_TRUE(absl::IsInvalidArgument(without_window)) << without_window;
  EXPECT_THAT(std::string(without_window.message()), HasSubstr("holes"));
}

// The engine reads no hole: it would pay for the page, or die for want of it.
TEST_F(ShmHostileTest, PushOfHoles) {
  auto peer = Connect(0);
  peer->pages_follow = true;
  ASSERT_TRUE(peer->Register().ok());
  auto segment = peer->MakeSegmentWithoutGradients();
  const UniqueFd fd(::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0));
  std::byte* const gradients =
      segment.data() + peer->segment_layout().gradient_pages();
  const uint64_t bytes = peer->segment_layout().segment_bytes -
                         peer->segment_layout().gradient_pages();
  ASSERT_GE(bytes, 3 * shm::kPageBytes) << "too small for a gap";
  ASSERT_TRUE(peer->Attach(std::move(segment)).ok());
  const auto expect_refused = [&] {
    struct stat before;
    struct stat after;
    ASSERT_EQ(::fstat(fd.get(), &before), 0);
    const auto answer = peer->Call(peer->Push(1));
    EXPECT_TRUE(absl::IsInvalidArgument(answer.status)) << answer.status;
    EXPECT_THAT(std::string(answer.status.message()), HasSubstr("pages"));
    EXPECT_EQ(job_.rank(0).pushes, 0u);
    ASSERT_EQ(::fstat(fd.get(), &after), 0);
    EXPECT_EQ(after.st_blocks, before.st_blocks) << "a hole was read";
  };
  expect_refused();
  // All but the first page, then all but the last one.
  ASSERT_TRUE(shm::PopulatePages(gradients + shm::kPageBytes,
                                 bytes - 2 * shm::kPageBytes)
                  .ok());
  expect_refused();
  ASSERT_TRUE(shm::PopulatePages(gradients, shm::kPageBytes).ok());
  expect_refused();
  ASSERT_TRUE(shm::PopulatePages(gradients, bytes).ok());
  const auto answer = peer->Call(peer->Push(1));
  EXPECT_TRUE(answer.status.ok()) << answer.status;
}

TEST_F(ShmHostileTest, SegmentThatIsNoMemory) {
  UniqueFd fd(::open("/dev/zero", O_RDWR | O_CLOEXEC));
  EXPECT_TRUE(absl::IsInvalidArgument(AttachWithFds({fd.get()})));
}

TEST_F(ShmHostileTest, NoSegmentOrTwo) {
  EXPECT_TRUE(absl::IsInvalidArgument(AttachWithFds({})));
  const auto segment = Connect(0)->MakeSegment();
  EXPECT_TRUE(
      absl::IsInvalidArgument(AttachWithFds({segment.fd(), segment.fd()})));
}

TEST_F(ShmHostileTest, HeaderFields) {
  const struct {
    const char* field;
    std::function<void(shm::ClientHeader*)> change;
  } kCases[] = {
      {"magic", [](auto* header) { header->magic = 1; }},
      {"version", [](auto* header) { header->version = 99; }},
      {"group_count", [](auto* header) { ++header->group_count; }},
      {"segment_bytes", [](auto* header) { header->segment_bytes += 4096; }},
      {"gradient_area_bytes",
       [](auto* header) { header->gradient_area_bytes = UINT64_MAX; }},
      {"layout_hash", [](auto* header) { header->layout_hash[31] ^= 1; }},
  };
  for (const auto& test : kCases) {
    const absl::Status status = AttachWith(test.change);
    EXPECT_TRUE(absl::IsInvalidArgument(status))
        << test.field << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(test.field));
  }
}

TEST_F(ShmHostileTest, AttachToAnotherLayout) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Register().ok());
  v1::SessionRequest attach = peer->AttachRequest();
  attach.mutable_attach()->set_layout_hash("short");
  ASSERT_TRUE(peer->Send(attach).ok());
  EXPECT_EQ(peer->Receive()->status().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST_F(ShmHostileTest, AttachBeforeRegisterOrAsNoRank) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Send(peer->AttachRequest()).ok());
  EXPECT_EQ(peer->Receive()->status().code(),
            static_cast<int>(absl::StatusCode::kFailedPrecondition));
  ASSERT_TRUE(peer->Register().ok());
  v1::SessionRequest attach = peer->AttachRequest();
  attach.mutable_attach()->set_rank(1 << 30);
  ASSERT_TRUE(peer->Send(attach).ok());
  EXPECT_EQ(peer->Receive()->status().code(),
            static_cast<int>(absl::StatusCode::kInvalidArgument));
}

// Wakes a session that sleeps: it looks at what the peer has written.
void Wake(const ShmTestPeer& peer) {
  std::atomic<uint32_t>& doorbell = peer.header()->ring.doorbell;
  doorbell.fetch_add(1);
  shm::FutexWakeAll(doorbell);
}

TEST_F(ShmHostileTest, TailBeyondTheRing) {
  for (const uint64_t tail :
       {uint64_t{shm::kRingEntries} + 1, uint64_t{1} << 40, UINT64_MAX}) {
    auto peer = Open(0);
    peer->header()->ring.produced_tail.store(tail);
    Wake(*peer);
    const absl::Status said = peer->AwaitEnd();
    EXPECT_TRUE(absl::IsDataLoss(said)) << said;
    job_.AwaitAttached(0, false);
  }
}

TEST_F(ShmHostileTest, HeadOfAnswersNeverGiven) {
  auto peer = Open(0);
  peer->header()->ring.consumed_head.store(5);
  Wake(*peer);
  const absl::Status said = peer->AwaitEnd();
  EXPECT_TRUE(absl::IsDataLoss(said)) << said;
}

TEST_F(ShmHostileTest, TailThatGoesBack) {
  auto peer = Open(0);
  ASSERT_TRUE(peer->Call(peer->Push(1)).status.ok());
  peer->header()->ring.produced_tail.store(0);
  Wake(*peer);
  EXPECT_TRUE(absl::IsDataLoss(peer->AwaitEnd()));
}

TEST_F(ShmHostileTest, UnknownOp) {
  for (const uint16_t op : {0, 10, 0xffff}) {
    auto peer = Open(0);
    shm::Submission submission = {};
    submission.op = op;
    peer->Submit(submission);
    const absl::Status said = peer->AwaitEnd();
    EXPECT_TRUE(absl::IsInvalidArgument(said)) << said;
  }
}

TEST_F(ShmHostileTest, RequestIdsOutOfOrder) {
  auto peer = Open(0);
  peer->next_request_id = 41;  // may start anywhere
  ASSERT_TRUE(peer->Call(peer->Push(1)).status.ok());
  ASSERT_TRUE(peer->Call(peer->Push(1)).status.ok());
  peer->next_request_id = 41;
  peer->Submit(peer->Push(1));
  EXPECT_TRUE(absl::IsInvalidArgument(peer->AwaitEnd()));
  EXPECT_EQ(job_.rank(0).pushes, 2u);
}

TEST_F(ShmHostileTest, TransfersBeyondTheWindow) {
  auto peer = Open(0);
  for (const shm::Op op : {shm::Op::kLoad, shm::Op::kFetch}) {
    for (const uint64_t numel :
         {shm::kWindowBytes / 4 + 1, UINT64_MAX / 4 + 1, UINT64_MAX}) {
      shm::Submission transfer = {};
      transfer.op = static_cast<uint16_t>(op);
      transfer.array = v1::STATE_ARRAY_MASTER;
      transfer.dtype = static_cast<uint16_t>(DType::kFloat32);
      transfer.numel = numel;
      const auto answer = peer->Call(transfer);
      EXPECT_TRUE(absl::IsInvalidArgument(answer.status)) << answer.status;
    }
  }
}

TEST_F(ShmHostileTest, UnknownArrayAndDtype) {
  auto peer = Open(0);
  for (const uint16_t array : {0, 10, 0xffff}) {
    shm::Submission load = {};
    load.op = static_cast<uint16_t>(shm::Op::kLoad);
    load.array = array;
    load.dtype = 1;
    EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(load).status));
    load.op = static_cast<uint16_t>(shm::Op::kFetch);
    EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(load).status));
  }
  for (const uint16_t dtype : {0, 4, 0xffff}) {
    shm::Submission load = {};
    load.op = static_cast<uint16_t>(shm::Op::kLoad);
    load.array = v1::STATE_ARRAY_MASTER;
    load.dtype = dtype;
    EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(load).status));
  }
}

TEST_F(ShmHostileTest, PushOfTooManyParameters) {
  auto peer = Open(0);
  shm::Submission push = peer->Push(1);
  for (const uint64_t count :
       {uint64_t{4}, uint64_t{UINT32_MAX}, uint64_t{1} << 32, UINT64_MAX}) {
    push.numel = count;
    EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(push).status));
  }
  push.parameter = UINT32_MAX;
  push.numel = 1;
  EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(push).status));
}

TEST_F(ShmHostileTest, UnknownCommitFlags) {
  auto peer = Open(0);
  shm::Submission commit = peer->Commit(1);
  commit.flags = 8;
  EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(commit).status));
}

TEST_F(ShmHostileTest, GarbageOnTheSocket) {
  const std::string kGarbage[] = {
      std::string(100, 'x'),
      std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
      std::string("OPST\xff\xff\xff\xff", 8),
      std::string("OPST\x04\0\0\0\xff\xff\xff\xff", 12),
      std::string("OPST\0\0\0\0", 8),  // a request without an operation
  };
  for (const std::string& garbage : kGarbage) {
    auto connected = Connect(0);
    ASSERT_GT(::write(connected->socket(), garbage.data(), garbage.size()), 0);
    EXPECT_TRUE(absl::IsInvalidArgument(connected->AwaitEnd()));
    auto attached = Open(0);
    ASSERT_GT(::write(attached->socket(), garbage.data(), garbage.size()), 0);
    EXPECT_TRUE(absl::IsInvalidArgument(attached->AwaitEnd()));
  }
}

TEST_F(ShmHostileTest, RequestsThatDoNotBelongOnTheSocket) {
  auto connected = Connect(0);
  v1::SessionRequest push;
  push.mutable_push()->set_step(1);
  ASSERT_TRUE(connected->Send(push).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(connected->AwaitEnd()));
  auto attached = Open(0);
  ASSERT_TRUE(attached->Send(attached->RegisterRequest()).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(attached->AwaitEnd()));
  job_.AwaitAttached(0, false);
}

TEST_F(ShmHostileTest, FrameCutShort) {
  auto peer = Connect(0);
  ASSERT_EQ(::write(peer->socket(), "OPST\x10\0\0\0half", 12), 12);
  ASSERT_EQ(::shutdown(peer->socket(), SHUT_WR), 0);
  EXPECT_TRUE(peer->AwaitEnd().ok());  // it ended without a reply
}

TEST_F(ShmHostileTest, HandshakeThatNeverEnds) {
  StartTransport(absl::Milliseconds(20));
  auto silent = Connect(0);
  EXPECT_TRUE(absl::IsDeadlineExceeded(silent->AwaitEnd()));
  auto registered = Connect(0);
  ASSERT_TRUE(registered->Register().ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(registered->AwaitEnd()));
  StartTransport(absl::Minutes(2));
}

TEST_F(ShmHostileTest, GradientsChangedWhileTheyAreRead) {
  auto peer = Open(0);
  for (uint64_t i = 0; i < 100; ++i) {
    peer->Submit(peer->Push(1));
    std::memset(peer->gradient_area(), static_cast<int>(i), 20000);
  }
  for (uint64_t i = 0; i < 100; ++i) {
    EXPECT_TRUE(peer->Await().status.ok());
  }
}

}  // namespace
}  // namespace optstate::transport
