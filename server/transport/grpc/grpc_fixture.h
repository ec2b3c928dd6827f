#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_FIXTURE_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_FIXTURE_H_

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "optstate/v1/session.grpc.pb.h"
#include "proto/types/conversions.h"
#include "proto/types/grpc_status.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"
#include "server/session/wire_counters.h"
#include "server/transport/fake_job.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/grpc/grpc_transport.h"
#include "server/transport/session_table.h"
#include "server/transport/test_layout.h"

namespace optstate::transport {

// The client's side of a session over gRPC, written out by hand.
class GrpcTestPeer {
 public:
  GrpcTestPeer(UniqueFd socket, Layout layout, uint32_t rank)
      : layout_(std::move(layout)),
        rank_(rank),
        connection_(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0)) {
    const int flags = ::fcntl(socket.get(), F_GETFL);
    ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK);
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(64 << 20);
    channel_ = grpc::CreateCustomInsecureChannelFromFd(
        "optstate", socket.release(), arguments);
    stub_ = v1::Session::NewStub(channel_);
    stream_ = stub_->Run(&context_);
  }
  // Ends the connection at once, as the kernel does for a process that dies; a
  // channel closes its socket only some time after it is destroyed.
  ~GrpcTestPeer() {
    context_.TryCancel();
    ::shutdown(connection_.get(), SHUT_RDWR);
  }

  grpc::ClientContext& context() { return context_; }

  v1::SessionRequest RegisterRequest() const {
    v1::SessionRequest request;
    v1::RegisterRequest& body = *request.mutable_register_();
    *body.mutable_layout() = optstate::ToProto(layout_);
    body.set_rank(rank_);
    body.set_world_size(2);
    body.set_local_world_size(2);
    body.set_partition(v1::PARTITION_MODE_GREEDY);
    return request;
  }

  bool Send(v1::SessionRequest request) {
    if (request.request_id() == 0) request.set_request_id(next_request_id_++);
    return stream_->Write(request);
  }
  // Writes the request unchanged.
  bool Write(const v1::SessionRequest& request) {
    return stream_->Write(request);
  }
  // Receives the next reply; one with an INTERNAL status where there is none.
  v1::SessionReply Receive() {
    v1::SessionReply reply;
    if (!stream_->Read(&reply)) {
      reply.mutable_status()->set_code(
          static_cast<int>(absl::StatusCode::kInternal));
      reply.mutable_status()->set_message("the stream ended");
    }
    return reply;
  }
  absl::Status Call(const v1::SessionRequest& request,
                    v1::SessionReply* reply = nullptr) {
    Send(request);
    const v1::SessionReply received = Receive();
    if (reply != nullptr) *reply = received;
    return FromProto(received.status());
  }
  absl::Status Open() {
    absl::Status registered = Call(RegisterRequest());
    if (!registered.ok()) return registered;
    v1::SessionRequest attach;
    attach.mutable_attach()->set_rank(rank_);
    attach.mutable_attach()->set_layout_hash(layout_.hash());
    attach.mutable_attach()->set_takes_notices(takes_notices);
    attach.mutable_attach()->set_fetches_parameters(fetches_parameters);
    v1::SessionReply reply;
    const absl::Status attached = Call(attach, &reply);
    attach_reply = reply.attach();
    return attached;
  }
  absl::Status Stage(uint64_t offset, std::string data) {
    v1::SessionRequest request;
    request.mutable_gradient_chunk()->set_offset_bytes(offset);
    request.mutable_gradient_chunk()->set_data(std::move(data));
    return Send(request) ? absl::OkStatus() : absl::UnavailableError("ended");
  }
  absl::Status Push(uint64_t step) {
    v1::SessionRequest request;
    request.mutable_push()->set_step(step);
    request.mutable_push()->set_parameter_count(3);
    return Call(request);
  }
  v1::SessionRequest EndMicroStepRequest(uint64_t step) const {
    v1::SessionRequest request;
    request.mutable_push()->set_step(step);
    return request;
  }
  v1::SessionRequest CommitRequest(uint64_t step) const {
    v1::SessionRequest request;
    request.mutable_commit()->set_step(step);
    request.mutable_commit()->add_groups();
    request.mutable_commit()->add_groups();
    return request;
  }
  // Reads until the stream ends; returns the stream's status.
  absl::Status AwaitEnd() {
    v1::SessionReply reply;
    while (stream_->Read(&reply)) {
    }
    return FromGrpc(stream_->Finish());
  }
  void HalfClose() { stream_->WritesDone(); }

  bool takes_notices = false;
  bool fetches_parameters = false;
  v1::AttachReply attach_reply;

 private:
  const Layout layout_;
  const uint32_t rank_;
  const UniqueFd connection_;  // the socket that the channel owns
  uint64_t next_request_id_ = 1;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Session::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionReply>>
      stream_;
};

// A fixture with a transport over a FakeJob of two ranks.
class GrpcFixture : public testing::Test {
 protected:
  void SetUp() override { StartTransport(absl::Minutes(2)); }

  void StartTransport(absl::Duration handshake_timeout) {
    transport_.reset();
    watcher_ = FdWatcher::Start().value();
    transport_ = GrpcTransport::Start({.job = &job_,
                                       .table = &table_,
                                       .watcher = watcher_.get(),
                                       .handshake_timeout = handshake_timeout})
                     .value();
  }

  void Serve(UniqueFd socket, int64_t pid) {
    Peer peer;
    peer.hello.set_job("test");
    peer.pid = pid;
    transport_->Serve(std::move(socket), std::move(peer));
  }

  UniqueFd Dial() {
    SocketPair sockets = MakeSocketPair();
    Serve(std::move(sockets.engine), 0);
    return std::move(sockets.client);
  }

  std::unique_ptr<GrpcTestPeer> Connect(uint32_t rank) {
    return std::make_unique<GrpcTestPeer>(Dial(), TestLayout(), rank);
  }

  std::unique_ptr<GrpcTestPeer> Open(uint32_t rank) {
    auto peer = Connect(rank);
    const absl::Status opened = peer->Open();
    EXPECT_TRUE(opened.ok()) << opened;
    return peer;
  }

  // Expects that another session still works, whatever became of the one under
  // test.
  void ExpectServes(uint32_t rank) {
    auto peer = Open(rank);
    EXPECT_TRUE(peer->Push(job_.committed_step() + 1).ok());
  }

  FakeJob job_;
  session::WireCounters wires_;
  SessionTable table_{
      SessionTable::Observers{.on_lost = nullptr, .wires = &wires_}};
  std::unique_ptr<FdWatcher> watcher_;
  std::unique_ptr<GrpcTransport> transport_;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_GRPC_FIXTURE_H_
