#include "server/transport/grpc_transport.h"

#include <unistd.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/frame.h"
#include "server/transport/grpc_fixture.h"

namespace optstate {
namespace {

using testing::HasSubstr;
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
  finish.mutable_finish_load();
  EXPECT_TRUE(peer->Call(finish).ok());
}

TEST_F(GrpcTransportTest, RefusesWrongTransfers) {
  auto peer = Open(0);
  v1::SessionRequest load;
  load.mutable_load()->set_array(v1::STATE_ARRAY_MASTER);
  load.mutable_load()->set_dtype(v1::DTYPE_FLOAT32);
  load.mutable_load()->set_data("abcde");  // no whole element
  EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(load)));
  load.mutable_load()->set_data(std::string(shm::kChunkBytesMax + 4, 'f'));
  EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(load)));
  load.mutable_load()->set_data("abcd");
  load.mutable_load()->set_dtype(static_cast<v1::DType>(77));
  EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(load)));
  load.mutable_load()->set_dtype(v1::DTYPE_FLOAT32);
  load.mutable_load()->set_array(static_cast<v1::StateArray>(-1));
  EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(load)));
  v1::SessionRequest fetch;
  fetch.mutable_fetch()->set_array(v1::STATE_ARRAY_MASTER);
  for (const uint64_t numel :
       {uint64_t{shm::kChunkBytesMax / 4 + 1}, UINT64_MAX / 4 + 1}) {
    fetch.mutable_fetch()->set_numel(numel);
    EXPECT_TRUE(absl::IsInvalidArgument(peer->Call(fetch)));
  }
  EXPECT_TRUE(peer->Push(1).ok());
}

TEST_F(GrpcTransportTest, NothingGoesBeforeAttach) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Call(peer->RegisterRequest()).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->Push(1)));
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->Call(peer->CommitRequest(1))));
  v1::SessionRequest request;
  request.mutable_finish_load();
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->Call(request)));
  request.mutable_read_parameters();
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->Call(request)));
  request.mutable_fetch()->set_numel(1);
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->Call(request)));
  peer->Stage(0, "abcd").IgnoreError();
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->AwaitEnd()));
}

TEST_F(GrpcTransportTest, ChunksOutOfRangeEndTheStream) {
  const struct {
    uint64_t offset;
    size_t bytes;
  } kCases[] = {{1 << 20, 4},
                {UINT64_MAX, 4},
                {UINT64_MAX - 3, 4},
                {0, shm::kChunkBytesMax + 1},
                {19000, 10000}};
  for (const auto& test : kCases) {
    auto peer = Open(0);
    EXPECT_TRUE(peer->Stage(test.offset, std::string(test.bytes, 'x')).ok());
    const absl::Status end = peer->AwaitEnd();
    EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
    EXPECT_THAT(std::string(end.message()), HasSubstr("gradient chunk"));
    EXPECT_FALSE(job_.rank(0).attached);
  }
  ExpectServes(0);
}

TEST_F(GrpcTransportTest, AChunkBeforeACommitIsAnsweredEndsTheStream) {
  auto peer = Open(0);
  auto other = Open(1);
  peer->Send(peer->CommitRequest(1));
  job_.AwaitCommit(0);
  peer->Stage(0, "abcd").IgnoreError();
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->AwaitEnd()));
  EXPECT_TRUE(other->Push(1).ok());
}

TEST_F(GrpcTransportTest, ParametersOfTwoStepsAreNotRead) {
  auto first = Open(0);
  auto second = Open(1);
  ASSERT_TRUE(first->Send(first->CommitRequest(1)));
  job_.AwaitCommit(0);
  v1::SessionRequest read;
  read.mutable_read_parameters();
  const absl::Status refused = first->Call(read);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("is not answered yet"));
  ASSERT_TRUE(second->Send(second->CommitRequest(1)));
  EXPECT_EQ(first->Receive().outcome().step(), 1u);
}

TEST_F(GrpcTransportTest, ARequestIdOf0EndsTheStream) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Write(peer->RegisterRequest()));
  const absl::Status end = peer->AwaitEnd();
  EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
  EXPECT_THAT(end.message(), HasSubstr("register with request_id 0"));
}

TEST_F(GrpcTransportTest, NothingAttachesThatHasNotRegistered) {
  auto other = Open(0);
  auto peer = Connect(1);
  v1::SessionRequest attach;
  attach.mutable_attach()->set_rank(1);
  attach.mutable_attach()->set_layout_hash(TestLayout().hash());
  const absl::Status refused = peer->Call(attach);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("before register"));
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

TEST_F(GrpcTransportTest, AChunkBeforeAMicroStepHasEndedEndsTheStream) {
  auto peer = Open(0);
  auto other = Open(1);
  peer->Send(peer->EndMicroStepRequest(1));
  job_.AwaitEnding(0);
  peer->Stage(0, "abcd").IgnoreError();
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->AwaitEnd()));
}

TEST_F(GrpcTransportTest, ARequestWithoutOperationEndsTheStream) {
  auto peer = Open(0);
  peer->Send({});
  EXPECT_TRUE(absl::IsInvalidArgument(peer->AwaitEnd()));
  ExpectServes(0);
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

TEST_F(GrpcTransportTest, AStreamThatNeverAttachesIsCancelled) {
  StartTransport(absl::Milliseconds(20));
  auto peer = Connect(0);
  peer->Send(peer->RegisterRequest());
  EXPECT_TRUE(absl::IsCancelled(peer->AwaitEnd()));
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

// A rank sends as many requests as a client may have in flight, and gradients
// of many megabytes with them, before it reads the first reply: both sides must
// not wait for each other.
TEST_F(GrpcTransportTest, APeerThatReadsLateGetsEveryReply) {
  auto peer = Open(0);
  constexpr int kCount = 1024;
  v1::SessionRequest push;
  push.mutable_push()->set_step(9);  // refused, with a text
  for (int i = 0; i < kCount; ++i) {
    ASSERT_TRUE(peer->Stage(0, std::string(20000, 'x')).ok());
    ASSERT_TRUE(peer->Send(push));
  }
  for (int i = 0; i < kCount; ++i) {
    EXPECT_EQ(peer->Receive().status().code(),
              static_cast<int>(absl::StatusCode::kFailedPrecondition));
  }
}

// A peer that sends requests and reads no replies is held back, and harms
// nobody.
TEST_F(GrpcTransportTest, APeerThatReadsNothing) {
  auto peer = Open(0);
  v1::SessionRequest fetch;
  fetch.mutable_fetch()->set_array(v1::STATE_ARRAY_STATE_0);
  fetch.mutable_fetch()->set_numel(1 << 18);
  v1::SessionRequest load;
  load.mutable_load()->set_array(v1::STATE_ARRAY_STATE_0);
  load.mutable_load()->set_dtype(v1::DTYPE_FLOAT32);
  load.mutable_load()->set_data(std::string(1 << 20, 'f'));
  ASSERT_TRUE(peer->Call(load).ok());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(peer->Send(fetch));
  ExpectServes(1);
  peer.reset();
  job_.AwaitAttached(0, false);
}

// Raw bytes on a connection that was handed over.
TEST_F(GrpcTransportTest, GarbageClosesTheConnection) {
  const std::string kGarbage[] = {
      std::string(1000, 'x'),
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string(300, '\xff'),
  };
  for (const std::string& garbage : kGarbage) {
    UniqueFd socket = Dial();
    ASSERT_GT(::write(socket.get(), garbage.data(), garbage.size()), 0);
    char buffer[4096];
    while (::read(socket.get(), buffer, sizeof(buffer)) > 0) {
    }
  }
  ExpectServes(0);
}

TEST_F(GrpcTransportTest, ASilentConnectionIsClosed) {
  StartTransport(absl::Milliseconds(20));
  UniqueFd socket = Dial();
  char buffer[4096];
  while (::read(socket.get(), buffer, sizeof(buffer)) > 0) {
  }
  StartTransport(absl::Minutes(2));
  ExpectServes(0);
}

// Messages that are no SessionRequest, on a stream that is one otherwise.
class GrpcRawTest : public GrpcFixture {
 protected:
  absl::Status SendRaw(const std::string& bytes,
                       grpc_compression_algorithm compression) {
    UniqueFd socket = Dial();
    ::fcntl(socket.get(), F_SETFL, O_NONBLOCK | O_RDWR);
    auto channel =
        grpc::CreateInsecureChannelFromFd("optstate", socket.release());
    grpc::ClientContext context;
    context.set_compression_algorithm(compression);
    grpc::internal::RpcMethod method("/optstate.v1.Session/Run",
                                     grpc::internal::RpcMethod::BIDI_STREAMING,
                                     channel);
    std::unique_ptr<
        grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>>
        stream(grpc::internal::ClientReaderWriterFactory<
               grpc::ByteBuffer, grpc::ByteBuffer>::Create(channel.get(),
                                                           method, &context));
    grpc::Slice slice(bytes);
    stream->Write(grpc::ByteBuffer(&slice, 1));
    grpc::ByteBuffer reply;
    while (stream->Read(&reply)) {
    }
    return FromGrpc(stream->Finish());
  }
};

TEST_F(GrpcRawTest, AMessageThatDoesNotParse) {
  const absl::Status end =
      SendRaw("\xff\xff\xff not protobuf", GRPC_COMPRESS_NONE);
  EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
  EXPECT_THAT(std::string(end.message()), HasSubstr("SessionRequest"));
  ExpectServes(0);
}

TEST_F(GrpcRawTest, AMessageCutShort) {
  v1::SessionRequest request;
  request.mutable_gradient_chunk()->set_data(std::string(1000, 'x'));
  const std::string whole = request.SerializeAsString();
  const absl::Status end =
      SendRaw(whole.substr(0, whole.size() / 2), GRPC_COMPRESS_NONE);
  EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
}

TEST_F(GrpcRawTest, AnOversizedMessage) {
  const absl::Status end =
      SendRaw(std::string(shm::kMessageBytesMax + 1, '\0'), GRPC_COMPRESS_NONE);
  EXPECT_TRUE(absl::IsResourceExhausted(end)) << end;
  ExpectServes(0);
}

TEST_F(GrpcRawTest, ACompressedMessageIsNotInflated) {
  const absl::Status end =
      SendRaw(std::string(64 << 20, '\0'), GRPC_COMPRESS_GZIP);
  EXPECT_FALSE(end.ok());
  ExpectServes(0);
}

}  // namespace
}  // namespace optstate
