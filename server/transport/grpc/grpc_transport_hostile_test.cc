// Peers over gRPC that make mistakes, on purpose or not.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/shm/frame.h"
#include "proto/types/grpc_status.h"
#include "proto/types/unique_fd.h"
#include "server/transport/grpc/grpc_fixture.h"

namespace optstate::transport {
namespace {

using ::testing::HasSubstr;
using GrpcTransportHostileTest = GrpcFixture;

TEST_F(GrpcTransportHostileTest, RefusesWrongTransfers) {
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

TEST_F(GrpcTransportHostileTest, NothingGoesBeforeAttach) {
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

TEST_F(GrpcTransportHostileTest, ChunksOutOfRangeEndTheStream) {
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

TEST_F(GrpcTransportHostileTest, AChunkBeforeACommitIsAnsweredEndsTheStream) {
  auto peer = Open(0);
  auto other = Open(1);
  peer->Send(peer->CommitRequest(1));
  job_.AwaitCommit(0);
  peer->Stage(0, "abcd").IgnoreError();
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->AwaitEnd()));
  EXPECT_TRUE(other->Push(1).ok());
}

TEST_F(GrpcTransportHostileTest, ParametersOfTwoStepsAreNotRead) {
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

TEST_F(GrpcTransportHostileTest, ARequestIdOf0EndsTheStream) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Write(peer->RegisterRequest()));
  const absl::Status end = peer->AwaitEnd();
  EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
  EXPECT_THAT(end.message(), HasSubstr("register with request_id 0"));
}

TEST_F(GrpcTransportHostileTest, NothingAttachesThatHasNotRegistered) {
  auto other = Open(0);
  auto peer = Connect(1);
  v1::SessionRequest attach;
  attach.mutable_attach()->set_rank(1);
  attach.mutable_attach()->set_layout_hash(TestLayout().hash());
  const absl::Status refused = peer->Call(attach);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("before register"));
}

TEST_F(GrpcTransportHostileTest, AChunkBeforeAMicroStepHasEndedEndsTheStream) {
  auto peer = Open(0);
  auto other = Open(1);
  peer->Send(peer->EndMicroStepRequest(1));
  job_.AwaitEnding(0);
  peer->Stage(0, "abcd").IgnoreError();
  EXPECT_TRUE(absl::IsFailedPrecondition(peer->AwaitEnd()));
}

TEST_F(GrpcTransportHostileTest, ARequestWithoutOperationEndsTheStream) {
  auto peer = Open(0);
  peer->Send({});
  EXPECT_TRUE(absl::IsInvalidArgument(peer->AwaitEnd()));
  ExpectServes(0);
}

TEST_F(GrpcTransportHostileTest, AStreamThatNeverAttachesIsCancelled) {
  StartTransport(absl::Milliseconds(20));
  auto peer = Connect(0);
  peer->Send(peer->RegisterRequest());
  EXPECT_TRUE(absl::IsCancelled(peer->AwaitEnd()));
}

// A rank sends as many requests as a client may have in flight, and gradients
// of many megabytes with them, before it reads the first reply: both sides must
// not wait for each other.
TEST_F(GrpcTransportHostileTest, APeerThatReadsLateGetsEveryReply) {
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
// no other.
TEST_F(GrpcTransportHostileTest, APeerThatReadsNothing) {
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
TEST_F(GrpcTransportHostileTest, GarbageClosesTheConnection) {
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

TEST_F(GrpcTransportHostileTest, ASilentConnectionIsClosed) {
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
}  // namespace optstate::transport
