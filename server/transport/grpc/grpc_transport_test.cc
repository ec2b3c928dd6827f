#include "server/transport/grpc/grpc_transport.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/socket.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/layout.h"
#include "server/transport/grpc/grpc_fixture.h"
#include "server/transport/test_layout.h"

namespace optstate::transport {
namespace {

using GrpcTransportTest = GrpcFixture;

TEST_F(GrpcTransportTest, TwoRanksTakeStepsTogether) {
  auto first = Open(0);
  auto second = Open(1);
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(first->Stage(0, std::string(15000, 'a')).ok());
    ASSERT_TRUE(first->Stage(15000, std::string(5000, 'b')).ok());
    ASSERT_TRUE(first->Push(step).ok());
    EXPECT_EQ(job_.rank(0).staged[14999], std::byte{'a'});
    EXPECT_EQ(job_.rank(0).staged[15000], std::byte{'b'});
    ASSERT_TRUE(second->Push(step).ok());
    v1::SessionRequest commit = first->CommitRequest(step);
    commit.set_request_id(100 + step);
    commit.mutable_commit()->mutable_groups(1)->add_values(0.125);
    commit.mutable_commit()->set_max_norm(3);
    ASSERT_TRUE(first->Send(commit));
    ASSERT_TRUE(second->Send(second->CommitRequest(step)));

    const v1::SessionReply reply = first->Receive();
    EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
    EXPECT_EQ(reply.request_id(), 100 + step);
    EXPECT_EQ(reply.outcome().step(), step);
    EXPECT_TRUE(reply.outcome().applied());
    EXPECT_EQ(reply.outcome().gradient_norm(), 2.5);
    EXPECT_EQ(second->Receive().outcome().step(), step);
    ASSERT_EQ(job_.rank(0).groups.size(), 2u);
    EXPECT_EQ(job_.rank(0).groups[1][0], 0.125);
    EXPECT_EQ(job_.rank(0).commit.max_norm, 3);
  }
}

TEST_F(GrpcTransportTest, RefusedRequestsAreCounted) {
  auto peer = Connect(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->Push(1)));
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->Call(peer->CommitRequest(1))));
  ASSERT_TRUE(peer->Open().ok());
  // A chunk in the wrong place ends the session.
  ASSERT_TRUE(peer->Stage(1 << 30, "x").ok());
  EXPECT_TRUE(absl::IsInvalidArgument(peer->AwaitEnd()));
  v1::Job job;
  wires_.Describe(&job);
  ASSERT_EQ(job.wires_size(), 1);
  EXPECT_EQ(job.wires(0).wire(), "grpc");
  ASSERT_EQ(job.wires(0).refused_size(), 2);
  EXPECT_EQ(job.wires(0).refused(0).code(), "invalid_argument");
  EXPECT_EQ(job.wires(0).refused(0).requests(), 1u);
  EXPECT_EQ(job.wires(0).refused(1).code(), "failed_precondition");
  EXPECT_EQ(job.wires(0).refused(1).requests(), 2u);
}

// A rank that reads nothing finds its replies in the queue.
TEST_F(GrpcTransportTest, RepliesThatWaitAreCounted) {
  auto peer = Open(0);
  const auto waiting = [this] {
    v1::Job job;
    wires_.Describe(&job);
    return job.wires_size() == 0 ? 0 : job.wires(0).replies_waiting();
  };
  v1::SessionRequest load;
  load.mutable_load()->set_array(v1::STATE_ARRAY_STATE_0);
  load.mutable_load()->set_dtype(v1::DTYPE_FLOAT32);
  load.mutable_load()->set_data(std::string(shm::kChunkBytesMax, 'f'));
  ASSERT_TRUE(peer->Call(load).ok());
  v1::SessionRequest fetch;
  fetch.mutable_fetch()->set_array(v1::STATE_ARRAY_STATE_0);
  fetch.mutable_fetch()->set_numel(shm::kChunkBytesMax / 4);
  // The stream takes far less that is not read.
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(peer->Send(fetch));
  const absl::Time deadline = absl::Now() + absl::Minutes(2);
  while (waiting() < 2 && absl::Now() < deadline) sched_yield();
  EXPECT_GE(waiting(), 2u);
}

TEST_F(GrpcTransportTest, ReadsParametersInChunks) {
  auto first = Open(0);
  auto second = Open(1);
  first->Send(first->CommitRequest(1));
  second->Send(second->CommitRequest(1));
  first->Receive();
  v1::SessionRequest read;
  read.set_request_id(9);
  read.mutable_read_parameters();
  ASSERT_TRUE(first->Send(read));
  const uint64_t bytes = TestLayout().parameter_area_bytes();
  uint64_t received = 0;
  while (received < bytes) {
    const v1::SessionReply reply = first->Receive();
    ASSERT_TRUE(reply.has_parameter_chunk());
    EXPECT_EQ(reply.request_id(), 9u);
    EXPECT_EQ(reply.parameter_chunk().offset_bytes(), received);
    EXPECT_LE(reply.parameter_chunk().data().size(), shm::kChunkBytesMax);
    EXPECT_EQ(reply.parameter_chunk().data()[0], 1);
    received += reply.parameter_chunk().data().size();
  }
  EXPECT_EQ(received, bytes);
  const v1::SessionReply last = first->Receive();
  EXPECT_EQ(last.request_id(), 9u);
  EXPECT_FALSE(last.has_parameter_chunk());
}

TEST_F(GrpcTransportTest, ParametersComeBeforeTheOutcomeThatWantsThem) {
  auto first = Open(0);
  auto second = Open(1);
  v1::SessionRequest commit = first->CommitRequest(1);
  commit.set_request_id(9);
  commit.mutable_commit()->set_wants_parameters(true);
  ASSERT_TRUE(first->Send(commit));
  ASSERT_TRUE(second->Send(second->CommitRequest(1)));
  EXPECT_FALSE(second->Receive().has_parameters());
  const Layout layout = TestLayout();
  std::string area(layout.parameter_area_bytes(), 0);
  v1::SessionReply reply;
  for (reply = first->Receive(); reply.has_parameter_chunk();
       reply = first->Receive()) {
    EXPECT_EQ(reply.request_id(), 9u);
    const v1::ParameterChunk& chunk = reply.parameter_chunk();
    ASSERT_LE(chunk.offset_bytes() + chunk.data().size(), area.size());
    area.replace(chunk.offset_bytes(), chunk.data().size(), chunk.data());
  }
  EXPECT_EQ(reply.request_id(), 9u);
  EXPECT_EQ(reply.outcome().step(), 1u);
  EXPECT_TRUE(reply.has_parameters());
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const ParameterSpec& spec = layout.parameters()[p];
    const auto bytes =
        static_cast<size_t>(spec.numel) * SizeInBytes(spec.dtype);
    EXPECT_EQ(area.substr(layout.parameter_offset_bytes(p), bytes),
              std::string(bytes, 1));
  }
}

TEST_F(GrpcTransportTest, ASessionThatFetchesParametersIsSentNone) {
  auto first = Connect(0);
  first->fetches_parameters = true;
  ASSERT_TRUE(first->Open().ok());
  EXPECT_TRUE(first->attach_reply.parameters_are_fetched());
  EXPECT_EQ(first->attach_reply.parameter_bytes(), 0u);
  auto second = Open(1);
  EXPECT_FALSE(second->attach_reply.parameters_are_fetched());
  v1::SessionRequest commit = first->CommitRequest(1);
  commit.mutable_commit()->set_wants_parameters(true);
  ASSERT_TRUE(first->Send(commit));
  ASSERT_TRUE(second->Send(second->CommitRequest(1)));
  const v1::SessionReply outcome = first->Receive();
  EXPECT_EQ(outcome.outcome().step(), 1u);
  EXPECT_FALSE(outcome.has_parameters());
  v1::SessionRequest read;
  read.mutable_read_parameters();
  EXPECT_TRUE(absl::IsFailedPrecondition(first->Call(read)));
}

// Each process that tries would leave one more, and its zeros are not what a
// rank has sent.
TEST_F(GrpcTransportTest, ARefusedAttachLeavesNoStagingFile) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Call(peer->RegisterRequest()).ok());
  session::AttachSpec other;
  other.rank = 0;
  ASSERT_TRUE(job_.Attach(other).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(peer->Open()));
  const std::string staging = job_.StagingPath(0, /*client_instance=*/0);
  EXPECT_FALSE(std::filesystem::exists(staging));
  job_.Detach(0);
  const absl::Status opened = peer->Open();
  ASSERT_TRUE(opened.ok()) << opened;
  EXPECT_FALSE(peer->attach_reply.gradients_present());
  EXPECT_TRUE(std::filesystem::exists(staging));
  EXPECT_TRUE(peer->Push(1).ok());
}

TEST_F(GrpcTransportTest, HintsReachTheJob) {
  auto peer = Open(0);
  v1::SessionRequest request;
  v1::ParameterHint& hint = *request.mutable_parameter_hint();
  hint.set_kind(v1::ParameterHint::KIND_RELEASE);
  hint.set_first_parameter(1);
  hint.set_parameter_count(2);
  ASSERT_TRUE(peer->Call(request).ok());
  hint.set_kind(v1::ParameterHint::KIND_UNSPECIFIED);
  EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(request)));
  ASSERT_EQ(job_.hints().size(), 1u);
  EXPECT_EQ(job_.hints()[0].hint, session::ParameterHint::kRelease);
  EXPECT_EQ(job_.hints()[0].first, 1u);
  EXPECT_EQ(job_.hints()[0].count, 2u);
}

TEST_F(GrpcTransportTest, LoadsAndFetches) {
  auto peer = Open(0);
  v1::SessionRequest begin;
  begin.mutable_begin_load();
  ASSERT_TRUE(peer->Call(begin).ok());
  v1::SessionRequest load;
  load.mutable_load()->set_array(v1::STATE_ARRAY_STATE_0);
  load.mutable_load()->set_begin(8);
  load.mutable_load()->set_dtype(v1::DTYPE_FLOAT32);
  load.mutable_load()->set_data(std::string(shm::kChunkBytesMax, 'f'));
  ASSERT_TRUE(peer->Call(load).ok());
  v1::SessionRequest fetch;
  fetch.mutable_fetch()->set_array(v1::STATE_ARRAY_STATE_0);
  fetch.mutable_fetch()->set_begin(8);
  fetch.mutable_fetch()->set_numel(shm::kChunkBytesMax / 4);
  v1::SessionReply reply;
  ASSERT_TRUE(peer->Call(fetch, &reply).ok());
  EXPECT_EQ(reply.fetch().data(), load.load().data());
  v1::SessionRequest finish;
  finish.mutable_finish_load()->set_content_digest(5);
  EXPECT_TRUE(peer->Call(finish).ok());
  EXPECT_EQ(job_.last_load_end().content_digest, 5u);
  EXPECT_FALSE(job_.last_load_end().begin_at.has_value());
  finish.mutable_finish_load()->set_begin_at_step(uint64_t{1} << 40);
  finish.mutable_finish_load()->set_begin_at_loads(3);
  EXPECT_TRUE(peer->Call(finish).ok());
  EXPECT_EQ(job_.last_load_end().begin_at, (BeginAt{uint64_t{1} << 40, 3}));
}

TEST_F(GrpcTransportTest, ANoticeComesBetweenReplies) {
  auto peer = Connect(0);
  peer->takes_notices = true;
  ASSERT_TRUE(peer->Open().ok());
  job_.rank(0).attach.listener->OnNotice("rank 1 lost");
  const v1::SessionReply reply = peer->Receive();
  EXPECT_EQ(reply.request_id(), 0u);
  EXPECT_EQ(reply.notice().text(), "rank 1 lost");
  EXPECT_TRUE(peer->Push(1).ok());
}

TEST_F(GrpcTransportTest, AnOlderPeerGetsNoNotice) {
  auto peer = Open(0);
  job_.rank(0).attach.listener->OnNotice("rank 1 lost");
  const absl::Status first = peer->Call(peer->CommitRequest(9));
  EXPECT_TRUE(absl::IsFailedPrecondition(first)) << first;
}

// The answer may come out of order: other requests are served meanwhile.
TEST_F(GrpcTransportTest, APushOfNothingIsAnsweredWhenAllHaveEnded) {
  auto first = Open(0);
  auto second = Open(1);
  first->Send(first->EndMicroStepRequest(1));
  job_.AwaitEnding(0);
  EXPECT_TRUE(first->Push(1).ok());
  EXPECT_TRUE(second->Call(second->EndMicroStepRequest(1)).ok());
  EXPECT_TRUE(FromProto(first->Receive().status()).ok());
  EXPECT_TRUE(
      absl::IsFailedPrecondition(first->Call(first->EndMicroStepRequest(7))));
  EXPECT_TRUE(first->Stage(0, "abcd").ok());
  EXPECT_TRUE(first->Push(1).ok()) << "its gradients may be written again";
}

TEST_F(GrpcTransportTest, AStreamCutMidStepDropsWhatWasStaged) {
  auto peer = Open(0);
  auto other = Open(1);
  ASSERT_TRUE(peer->Push(1).ok());
  peer->context().TryCancel();
  job_.AwaitAttached(0, false);
  EXPECT_TRUE(job_.rank(0).staged.empty());
  EXPECT_TRUE(other->Push(1).ok());
  ExpectServes(0);
}

TEST_F(GrpcTransportTest, AHalfCloseDetachesInGoodOrder) {
  auto peer = Open(0);
  peer->HalfClose();
  EXPECT_TRUE(peer->AwaitEnd().ok());
  EXPECT_FALSE(job_.rank(0).attached);
}

TEST_F(GrpcTransportTest, DetachFreesTheRankBeforeItIsAnswered) {
  auto peer = Open(0);
  v1::SessionRequest detach;
  detach.mutable_detach();
  EXPECT_TRUE(peer->Call(detach).ok());
  EXPECT_FALSE(job_.rank(0).attached);
  EXPECT_TRUE(peer->AwaitEnd().ok());
}

TEST_F(GrpcTransportTest, ALiveOwnerKeepsItsRank) {
  auto first = Open(0);
  auto second = Connect(0);
  EXPECT_TRUE(absl::IsAlreadyExists(second->Open()));
  EXPECT_TRUE(first->Push(1).ok());
}

TEST_F(GrpcTransportTest, ASuccessorTakesTheRankOfADeadOwner) {
  for (int i = 0; i < 20; ++i) Open(0);
  EXPECT_EQ(job_.rank(0).attaches, 20u);
}

// Time in which the peer waits for this side does not count as the peer's.
TEST_F(GrpcTransportTest, ALongRegistrationDoesNotCountAgainstItsPeer) {
  StartTransport(absl::Milliseconds(500));
  auto peer = Connect(0);
  table_.registration().Lock();
  ASSERT_TRUE(peer->Send(peer->RegisterRequest()));
  // This connection begins later, so its time is over later.
  auto silent = Connect(1);
  const absl::Status end = silent->AwaitEnd();
  table_.registration().Unlock();
  EXPECT_TRUE(absl::IsCancelled(end)) << end;
  const v1::SessionReply reply = peer->Receive();
  EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
}

// A large registration over a slow link takes several times the limit of a
// silent peer.
TEST_F(GrpcTransportTest, ARegistrationMayArriveSlowlyAsLongAsItDoes) {
  StartTransport(absl::Milliseconds(500));
  SocketPair network = MakeTcpPair();
  Serve(std::move(network.engine), 0);
  SocketPair local = MakeSocketPair();
  const int buffer_bytes = 16 << 10;
  ::setsockopt(local.client.get(), SOL_SOCKET, SO_SNDBUF, &buffer_bytes,
               sizeof(buffer_bytes));
  // The thread is the link, passing 16 KiB at a time.
  std::thread there([&] {
    char buffer[16 << 10];
    ssize_t n = 0;
    while ((n = ::recv(local.engine.get(), buffer, sizeof(buffer), 0)) > 0) {
      if (::send(network.client.get(), buffer, static_cast<size_t>(n),
                 MSG_NOSIGNAL) != n) {
        break;
      }
      absl::SleepFor(absl::Milliseconds(30));
    }
    ::shutdown(network.client.get(), SHUT_RDWR);
  });
  std::thread back([&] {
    char buffer[16 << 10];
    ssize_t n = 0;
    while ((n = ::recv(network.client.get(), buffer, sizeof(buffer), 0)) > 0) {
      if (::send(local.engine.get(), buffer, static_cast<size_t>(n),
                 MSG_NOSIGNAL) != n) {
        break;
      }
    }
    ::shutdown(local.engine.get(), SHUT_RDWR);
  });
  {
    GrpcTestPeer peer(std::move(local.client), TestLayout(), 0);
    v1::SessionRequest large = peer.RegisterRequest();
    large.mutable_register_()->set_host_id(std::string(1 << 20, 'h'));
    ASSERT_TRUE(peer.Send(std::move(large)));
    EXPECT_NE(peer.Receive().status().message(), "the stream ended");
  }
  there.join();
  back.join();
}

TEST_F(GrpcTransportTest, ShutdownEndsStreams) {
  auto peer = Open(0);
  ASSERT_TRUE(peer->Push(1).ok());
  transport_->Shutdown();
  EXPECT_FALSE(peer->AwaitEnd().ok());
  EXPECT_FALSE(job_.rank(0).attached);
  EXPECT_EQ(transport_->session_count(), 0u);
}

}  // namespace
}  // namespace optstate::transport
