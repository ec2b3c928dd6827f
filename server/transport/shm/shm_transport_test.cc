#include "server/transport/shm/shm_transport.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/transport/shm/shm_fixture.h"

namespace optstate::transport {
namespace {

using ShmTransportTest = ShmFixture;

TEST_F(ShmTransportTest, TwoRanksTakeStepsTogether) {
  auto first = Open(0);
  auto second = Open(1);
  for (uint64_t step = 1; step <= 3; ++step) {
    std::memset(first->gradient_area(), static_cast<int>(step), 20000);
    ASSERT_TRUE(first->Call(first->Push(step)).status.ok());
    EXPECT_EQ(job_.rank(0).staged[19999], static_cast<std::byte>(step));
    ASSERT_TRUE(second->Call(second->Push(step)).status.ok());
    first->commit_groups()[1].value[0] = 0.25 * static_cast<double>(step);
    const uint64_t request = first->Submit(first->Commit(step));
    second->Submit(second->Commit(step));

    const auto answer = first->Await();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.completion.request_id, request);
    EXPECT_EQ(answer.completion.step, step);
    EXPECT_EQ(answer.completion.flags, shm::kCompletionApplied);
    EXPECT_EQ(answer.completion.gradient_norm, 2.5);
    EXPECT_EQ(answer.completion.clip_coefficient, 0.5);
    EXPECT_EQ(answer.completion.update_ns, 42u);
    ASSERT_TRUE(second->Await().status.ok());
    EXPECT_EQ(first->parameters()[0], static_cast<std::byte>(step));
    EXPECT_EQ(second->parameters()[0], static_cast<std::byte>(step));
    ASSERT_EQ(job_.rank(0).groups.size(), 2u);
    EXPECT_EQ(job_.rank(0).groups[1][0], 0.25 * static_cast<double>(step));
  }
}

// Areas at one offset within a page would compete for one set of the cache.
TEST_F(ShmTransportTest, TheJobWorksAheadWhenAPushHasBeenAnswered) {
  auto peer = Open(0);
  ASSERT_TRUE(peer->Call(peer->Push(1)).status.ok());
  job_.AwaitWorkAhead(0);
}

TEST_F(ShmTransportTest, GradientAreasOfRanksBeginApartWithinAPage) {
  auto first = Open(0);
  auto second = Open(1);
  const auto begin_in_page = [this](uint32_t rank) {
    return reinterpret_cast<uintptr_t>(job_.rank(rank).attach.gradient_area) %
           shm::kPageBytes;
  };
  EXPECT_EQ(begin_in_page(0), 0u);
  EXPECT_EQ(begin_in_page(1), 256u);
  EXPECT_EQ(job_.rank(1).attach.gradient_offset_bytes % shm::kPageBytes, 256u);
}

TEST_F(ShmTransportTest, AClientOfAnOlderProtocolHasNoLead) {
  auto peer = Connect(1, shm::kGradientLeadProtocol - 1);
  ASSERT_TRUE(peer->Open().ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(job_.rank(1).attach.gradient_area) %
                shm::kPageBytes,
            0u);
  std::memset(peer->gradient_area(), 7, peer->partition().gradient_area_bytes);
  ASSERT_TRUE(peer->Call(peer->Push(1)).status.ok());
  const std::vector<std::byte> staged = job_.rank(1).staged;
  EXPECT_EQ(staged, std::vector<std::byte>(staged.size(), std::byte{7}));
}

// Parameters are pushed as their pages come; the job learns how far they had
// come at the attach.
TEST_F(ShmTransportTest, PagesOfGradientsMayFollowTheAttach) {
  auto peer = Connect(1);
  peer->pages_follow = true;
  ASSERT_TRUE(peer->Send(peer->RegisterRequest()).ok());
  const auto registered = peer->Receive();
  ASSERT_TRUE(registered.ok()) << registered.status();
  EXPECT_TRUE(registered->register_().pages_may_follow());
  auto segment = peer->MakeSegmentWithoutGradients();
  const shm::ClientSegmentLayout& layout = peer->segment_layout();
  std::byte* const gradients = segment.data() + layout.gradient_pages();
  ASSERT_TRUE(shm::PopulatePages(gradients, shm::kPageBytes).ok());
  ASSERT_TRUE(peer->Attach(std::move(segment)).ok());
  EXPECT_EQ(job_.rank(1).attach.gradient_bytes_present,
            shm::kPageBytes - shm::GradientLeadBytes(1));
  ASSERT_TRUE(shm::PopulatePages(gradients,
                                 layout.segment_bytes - layout.gradient_pages())
                  .ok());
  std::memset(peer->gradient_area(), 7, peer->partition().gradient_area_bytes);
  ASSERT_TRUE(peer->Call(peer->Push(1)).status.ok());
  const std::vector<std::byte> staged = job_.rank(1).staged;
  EXPECT_EQ(staged, std::vector<std::byte>(staged.size(), std::byte{7}));
}

TEST_F(ShmTransportTest, AllPagesAreThereWhenNoneAreSaidToFollow) {
  auto peer = Open(1);
  EXPECT_EQ(job_.rank(1).attach.gradient_bytes_present,
            session::AttachSpec::kAllPresent);
}

TEST_F(ShmTransportTest, ASegmentOfAnotherProtocolIsRefused) {
  auto peer = Connect(1);
  ASSERT_TRUE(peer->Register().ok());
  const absl::Status attached =
      peer->Attach(peer->MakeSegment([](shm::ClientHeader* header) {
        header->version = shm::kClientSegmentVersionWithoutLead;
      }));
  EXPECT_TRUE(absl::IsInvalidArgument(attached)) << attached;
}

TEST_F(ShmTransportTest, CommitCarriesEveryField) {
  auto first = Open(0);
  auto second = Open(1);
  *first->commit_settings() = {
      .max_value = 0.25, .norm_type = 1, .reserved = {}};
  first->commit_groups()[0] = {.value = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12},
                               .max_norm = 13,
                               .clips_with = 0,
                               .reserved0 = 0,
                               .reserved = {}};
  shm::Submission commit = first->Commit(1);
  commit.flags = shm::kSubmissionFoundInf;
  commit.grad_scale = 1024;
  commit.max_norm = 1.5;
  first->Submit(commit);
  second->Submit(second->Commit(1));
  const auto answer = first->Await();
  EXPECT_TRUE(answer.status.ok());
  EXPECT_EQ(answer.completion.flags, shm::kCompletionFoundInf);
  const FakeJob::Rank rank = job_.rank(0);
  EXPECT_EQ(rank.commit.step, 1u);
  EXPECT_EQ(rank.commit.grad_scale, 1024);
  EXPECT_EQ(rank.commit.max_norm, 1.5);
  EXPECT_TRUE(rank.commit.found_inf);
  EXPECT_EQ(rank.commit.max_value, 0.25);
  EXPECT_EQ(rank.commit.norm_type, 1);
  const Hyperparams& group = rank.groups[0];
  for (size_t i = 0; i < kHyperparamsMax; ++i) {
    EXPECT_EQ(group[i], static_cast<double>(i + 1));
  }
  EXPECT_EQ(group.max_norm, 13);
}

TEST_F(ShmTransportTest, LoadsAndFetchesThroughTheWindows) {
  auto peer = Open(0);
  shm::Submission begin = {};
  begin.op = static_cast<uint16_t>(shm::Op::kBeginLoad);
  ASSERT_TRUE(peer->Call(begin).status.ok());

  // The load takes as much as the windows hold.
  constexpr uint64_t kNumel = shm::kWindowBytes / 4;
  for (uint64_t i = 0; i < shm::kWindowBytes; ++i) {
    peer->load_window()[i] = static_cast<std::byte>(i * 7 + i / 4096);
  }
  shm::Submission load = {};
  load.op = static_cast<uint16_t>(shm::Op::kLoad);
  load.array = v1::STATE_ARRAY_STATE_0;
  load.dtype = static_cast<uint16_t>(DType::kFloat32);
  load.parameter = 1;
  load.begin = 17;
  load.numel = kNumel;
  ASSERT_TRUE(peer->Call(load).status.ok());

  shm::Submission fetch = load;
  fetch.op = static_cast<uint16_t>(shm::Op::kFetch);
  fetch.dtype = 0;
  const auto fetched = peer->Call(fetch);
  ASSERT_TRUE(fetched.status.ok()) << fetched.status;
  EXPECT_EQ(
      std::memcmp(peer->fetch_window(), peer->load_window(), shm::kWindowBytes),
      0);
  shm::Submission finish = {};
  finish.op = static_cast<uint16_t>(shm::Op::kFinishLoad);
  const auto finished = peer->Call(finish);
  EXPECT_TRUE(finished.status.ok());
  EXPECT_EQ(finished.completion.request_id, 4u);
  EXPECT_FALSE(job_.last_load_end().begin_at.has_value());
  finish.step = uint64_t{1} << 40;
  finish.micro_step = 3;
  EXPECT_TRUE(peer->Call(finish).status.ok());
  EXPECT_EQ(job_.last_load_end().begin_at, (BeginAt{uint64_t{1} << 40, 3}));
}

TEST_F(ShmTransportTest, StepCountsAreLoadedAsInt64) {
  auto peer = Open(0);
  const int64_t counts[3] = {3, 4, 5};
  std::memcpy(peer->load_window(), counts, sizeof(counts));
  shm::Submission load = {};
  load.op = static_cast<uint16_t>(shm::Op::kLoad);
  load.array = v1::STATE_ARRAY_STEP_COUNT;
  load.numel = 3;
  ASSERT_TRUE(peer->Call(load).status.ok());
  load.op = static_cast<uint16_t>(shm::Op::kFetch);
  ASSERT_TRUE(peer->Call(load).status.ok());
  EXPECT_EQ(std::memcmp(peer->fetch_window(), counts, sizeof(counts)), 0);
}

TEST_F(ShmTransportTest, LongErrorsAreCut) {
  auto peer = Open(0);
  shm::Submission abort = {};
  abort.op = static_cast<uint16_t>(shm::Op::kAbort);
  abort.step = 9;
  const auto answer = peer->Call(abort);
  EXPECT_TRUE(absl::IsFailedPrecondition(answer.status));
  EXPECT_EQ(answer.status.message(), std::string(shm::kTextBytes, 'x'));
}

TEST_F(ShmTransportTest, APeerThatReadsLateGetsEveryAnswer) {
  auto peer = Open(0);
  // The count exceeds a ring: the engine stops taking, the rest waits in the
  // ring.
  constexpr uint64_t kCount = 2 * shm::kRingEntries;
  for (uint64_t i = 0; i < kCount; ++i) peer->Submit(peer->Push(1));
  for (uint64_t i = 1; i <= kCount; ++i) {
    const auto answer = peer->Await();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    ASSERT_EQ(answer.completion.request_id, i);
  }
  EXPECT_EQ(job_.rank(0).pushes, kCount);
}

TEST_F(ShmTransportTest, ARefusedRequestDoesNotEndTheHandshake) {
  auto peer = Connect(0);
  v1::SessionRequest wrong = peer->RegisterRequest();
  wrong.mutable_register_()->mutable_layout()->mutable_parameters(0)->set_numel(
      7);
  ASSERT_TRUE(peer->Send(wrong).ok());
  auto reply = peer->Receive();
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->status().code(), 3);
  EXPECT_TRUE(peer->Open().ok());
}

TEST_F(ShmTransportTest, DetachFreesTheRankBeforeItIsAnswered) {
  for (int i = 0; i < 20; ++i) {
    auto peer = Open(0);
    v1::SessionRequest detach;
    detach.set_request_id(77);
    detach.mutable_detach();
    ASSERT_TRUE(peer->Send(detach).ok());
    const auto reply = peer->Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->request_id(), 77u);
    EXPECT_FALSE(job_.rank(0).attached);
  }
}

TEST_F(ShmTransportTest, AHangUpDropsWhatWasStaged) {
  auto peer = Open(0);
  ASSERT_TRUE(peer->Call(peer->Push(1)).status.ok());
  ASSERT_FALSE(job_.rank(0).staged.empty());
  peer.reset();
  job_.AwaitAttached(0, false);
  EXPECT_TRUE(job_.rank(0).staged.empty());
}

// The gradients' memory is reported for the next engine.
TEST_F(ShmTransportTest, SaysWhichMemoryHasTheGradients) {
  auto peer = Open(0);
  const FakeJob::Rank rank = job_.rank(0);
  ASSERT_NE(rank.gradient_segment, nullptr);
  const uint64_t bytes = rank.attach.gradient_area_bytes;
  std::string written(bytes, 'g');
  written.back() = 'e';
  std::memcpy(peer->gradient_area(), written.data(), bytes);
  std::string found(bytes, 0);
  EXPECT_EQ(::pread(rank.gradient_segment->get(), found.data(), bytes,
                    static_cast<off_t>(rank.attach.gradient_offset_bytes)),
            static_cast<ssize_t>(bytes));
  EXPECT_TRUE(found == written);
}

// The answer may come out of order: other requests are served meanwhile.
TEST_F(ShmTransportTest, APushOfNothingIsAnsweredWhenAllHaveEnded) {
  auto first = Open(0);
  auto second = Open(1);
  shm::Submission end = first->Push(1);
  end.numel = 0;
  const uint64_t request = first->Submit(end);
  job_.AwaitEnding(0);
  EXPECT_EQ(first->Call(first->Push(1)).completion.request_id, request + 1);
  second->Submit(end);
  const auto answer = first->Await();
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.completion.request_id, request);
  EXPECT_TRUE(second->Await().status.ok());
  end.step = 7;
  EXPECT_TRUE(absl::IsFailedPrecondition(first->Call(end).status));
}

TEST_F(ShmTransportTest, ANoticeComesOverTheSocket) {
  auto peer = Connect(0);
  peer->takes_notices = true;
  ASSERT_TRUE(peer->Open().ok());
  peer->Submit(peer->Commit(1));
  job_.AwaitCommit(0);
  job_.rank(0).attach.listener->OnNotice("rank 1 lost");
  const auto reply = peer->Receive();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->request_id(), 0u);
  EXPECT_EQ(reply->notice().text(), "rank 1 lost");
  auto other = Open(1);
  EXPECT_TRUE(other->Call(other->Commit(1)).status.ok());
  EXPECT_TRUE(peer->Await().status.ok());
}

TEST_F(ShmTransportTest, APeerThatDoesNotReadMissesNoticesAlone) {
  SocketPair sockets = MakeSocketPair();
  const int small = 1;  // as small as the kernel has it
  ASSERT_EQ(::setsockopt(sockets.engine.get(), SOL_SOCKET, SO_SNDBUF, &small,
                         sizeof(small)),
            0);
  Serve(std::move(sockets.engine), 0);
  ShmTestPeer peer(std::move(sockets.client), TestLayout(), 2, 0);
  peer.takes_notices = true;
  ASSERT_TRUE(peer.Open().ok());
  constexpr int kMany = 32;
  for (int i = 0; i < kMany; ++i) {
    job_.rank(0).attach.listener->OnNotice("rank 1 lost");
  }
  // The engine looks for notices between two requests.
  EXPECT_TRUE(peer.Call(peer.Push(1)).status.ok());
  EXPECT_TRUE(peer.Call(peer.Push(1)).status.ok());
  int arrived = 0;
  pollfd socket = {peer.socket(), POLLIN, 0};
  for (; ::poll(&socket, 1, 0) > 0; ++arrived) {
    const auto reply = peer.Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->notice().text(), "rank 1 lost");
  }
  EXPECT_GT(arrived, 0);
  EXPECT_LT(arrived, kMany);
  job_.rank(0).attach.listener->OnNotice("rank 2 lost");
  const auto reply = peer.Receive();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->notice().text(), "rank 2 lost");
}

// An older peer would take a notice for the session's end.
TEST_F(ShmTransportTest, AnOlderPeerGetsNoNotice) {
  auto peer = Open(0);
  job_.rank(0).attach.listener->OnNotice("rank 1 lost");
  EXPECT_TRUE(peer->Call(peer->Push(1)).status.ok());
  transport_->Shutdown("that was all");
  const auto reply = peer->Receive();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_FALSE(reply->has_notice());
  EXPECT_EQ(reply->status().message(), "that was all");
}

TEST_F(ShmTransportTest, AHangUpDropsACommitThatWaits) {
  auto first = Open(0);
  auto second = Open(1);
  first->Submit(first->Commit(1));
  job_.AwaitCommit(0);
  first.reset();
  job_.AwaitAttached(0, false);
  first = Open(0);
  first->Submit(first->Commit(1));
  job_.AwaitCommit(0);
  second->Submit(second->Commit(1));
  EXPECT_TRUE(first->Await().status.ok());
  EXPECT_TRUE(second->Await().status.ok());
}

TEST_F(ShmTransportTest, ALiveOwnerKeepsItsRank) {
  auto first = Open(0);
  auto second = Connect(0);
  const absl::Status refused = second->Open();
  EXPECT_TRUE(absl::IsAlreadyExists(refused)) << refused;
  EXPECT_TRUE(first->Call(first->Push(1)).status.ok());
}

// The trainer was killed inside a push and started again at once.
TEST_F(ShmTransportTest, ASuccessorTakesTheRankOfADeadOwner) {
  auto first = Open(0);
  job_.HoldPushes(true);
  first->Submit(first->Push(1));
  job_.AwaitHeldPush();
  first.reset();
  // The old session is still inside the job, so it cannot have noticed the
  // death.
  auto second = Connect(0);
  ASSERT_TRUE(second->Register().ok());
  ASSERT_TRUE(second->SendAttach(second->MakeSegment()).ok());
  job_.HoldPushes(false);
  const auto reply = second->Receive();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->status().code(), 0) << reply->status().message();
  EXPECT_EQ(job_.rank(0).attaches, 2u);
  EXPECT_TRUE(job_.rank(0).staged.empty());
}

TEST_F(ShmTransportTest, ShutdownSaysWhy) {
  auto attached = Open(0);
  auto connected = Connect(1);
  transport_->Shutdown("optstated shuts down");
  const absl::Status said = attached->AwaitEnd();
  EXPECT_TRUE(absl::IsUnavailable(said));
  EXPECT_EQ(said.message(), "optstated shuts down");
  EXPECT_TRUE(absl::IsUnavailable(connected->AwaitEnd()));
  EXPECT_FALSE(job_.rank(0).attached);
  EXPECT_EQ(transport_->session_count(), 0u);
}

// A fixture with real processes, forked before the transport has threads.
class ShmTransportProcessTest : public ShmFixture {
 protected:
  void SetUp() override {}

  // Runs `body` with its end of a socket in a child that never returns.
  template <typename Body>
  pid_t Fork(const Body& body) {
    SocketPair sockets = MakeSocketPair();
    const pid_t pid = ::fork();
    if (pid == 0) {
      sockets.engine.reset();
      ShmTestPeer peer(std::move(sockets.client), TestLayout(), 2, 0);
      body(&peer);
      while (true) ::pause();
    }
    engine_socket_ = std::move(sockets.engine);
    return pid;
  }

  void Kill(pid_t pid) {
    ::kill(pid, SIGKILL);
    int status;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  }

  UniqueFd engine_socket_;
};

TEST_F(ShmTransportProcessTest, AKilledRankIsDetached) {
  const pid_t pid = Fork([](ShmTestPeer* peer) {
    if (!peer->Open().ok()) _exit(1);
    while (peer->Call(peer->Push(1)).status.ok()) {
    }
  });
  StartTransport(absl::Minutes(2));
  job_.HoldPushes(true);
  Serve(std::move(engine_socket_), pid);
  job_.AwaitHeldPush();  // mid-push
  Kill(pid);
  job_.HoldPushes(false);
  job_.AwaitAttached(0, false);
  EXPECT_TRUE(job_.rank(0).staged.empty());
  ExpectServes(0);
}

// The killed rank's data loader lives on and holds a copy of the socket.
TEST_F(ShmTransportProcessTest, AKilledRankIsDetachedThoughItsChildLives) {
  UniqueFd read_end, write_end;
  int fds[2];
  ASSERT_EQ(::pipe(fds), 0);
  read_end.reset(fds[0]);
  write_end.reset(fds[1]);
  const pid_t pid = Fork([&](ShmTestPeer* peer) {
    const pid_t child = ::fork();
    if (child == 0) {
      while (true) ::pause();
    }
    if (::write(write_end.get(), &child, sizeof(child)) < 0) _exit(1);
    if (!peer->Open().ok()) _exit(1);
  });
  pid_t child;
  ASSERT_EQ(::read(read_end.get(), &child, sizeof(child)),
            static_cast<ssize_t>(sizeof(child)));
  StartTransport(absl::Minutes(2));
  Serve(std::move(engine_socket_), pid);
  job_.AwaitAttached(0, true);
  Kill(pid);
  job_.AwaitAttached(0, false);
  ::kill(child, SIGKILL);
}

}  // namespace
}  // namespace optstate::transport
