// The messages of a rank's session over gRPC, as they come out of gRPC:
// requests that were admitted are parsed and carried out on a job that computes
// nothing. Input: messages, each with its length in two bytes.

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"
#include "server/transport/grpc/chunk_header.h"
#include "server/transport/grpc/grpc_session.h"
#include "server/transport/grpc/reply_queue.h"
#include "server/transport/peer.h"
#include "server/transport/request_size.h"
#include "server/transport/session_table.h"
#include "server/transport/test_layout.h"
#include "tests/fuzz/bounded_job.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

constexpr int kMessagesMax = 64;

transport::Peer RankPeer() {
  transport::Peer peer;
  peer.hello.set_job("fuzz");
  peer.hello.set_protocol_version_min(shm::kProtocolVersion);
  peer.hello.set_protocol_version_max(shm::kProtocolVersion);
  return peer;
}

// The stream of one rank, without gRPC.
class Stream {
 public:
  Stream()
      : link_(-1, 0),
        replies_(/*replies_max=*/1024, /*bytes_max=*/size_t{64} << 20),
        session_(&job_, &table_, RankPeer(), &link_, &replies_, [] {}) {}
  ~Stream() { session_.Detach("the input has ended"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Takes one message; an error ends the stream.
  absl::Status Take(absl::string_view message) {
    google::protobuf::io::ArrayInputStream bytes(
        message.data(), static_cast<int>(message.size()));
    const auto parsed_bytes = transport::ParsedBytes(&bytes);
    v1::SessionRequest request;
    const bool is_request = request.ParseFromArray(
        message.data(), static_cast<int>(message.size()));
    if (is_request && parsed_bytes.ok()) {
      Require(*parsed_bytes + 4096 >= request.SpaceUsedLong() / 2,
              "the memory that a request takes is estimated");
    }
    const auto staged = StageChunk(message, is_request ? &request : nullptr);
    if (!staged.ok() || *staged) return staged.status();
    if (!is_request) return absl::InvalidArgumentError("no SessionRequest");
    return session_.Handle(request);
  }

  void ReadReplies() {
    while (const auto reply = replies_.Pop(absl::InfinitePast())) {
      v1::SessionReply read;
      Require(read.ParseFromString(reply->SerializeAsString()),
              "a client can parse each reply");
    }
  }

 private:
  // Copies a gradient chunk as the server of a stream does.
  absl::StatusOr<bool> StageChunk(absl::string_view message,
                                  const v1::SessionRequest* request) {
    google::protobuf::io::CodedInputStream input(
        reinterpret_cast<const uint8_t*>(message.data()),
        static_cast<int>(message.size()));
    const std::optional<transport::ChunkHeader> header =
        transport::ReadChunkHeader(&input, message.size());
    if (!header.has_value()) return false;
    Require(
        request != nullptr && request->has_gradient_chunk() &&
            request->gradient_chunk().offset_bytes() == header->offset_bytes &&
            request->gradient_chunk().data().size() == header->data_bytes,
        "a chunk's header says what protobuf's parser says");
    OPTSTATE_ASSIGN_OR_RETURN(
        std::byte* const to,
        session_.StagingFor(header->offset_bytes, header->data_bytes));
    Require(input.ReadRaw(to, static_cast<int>(header->data_bytes)),
            "a chunk has the bytes that its header says");
    return true;
  }

  BoundedJob job_;
  transport::SessionTable table_;
  const transport::PeerLink link_;
  transport::ReplyQueue replies_;
  transport::GrpcSession session_;
};

v1::SessionRequest RegisterRequest() {
  v1::SessionRequest request;
  v1::RegisterRequest& body = *request.mutable_register_();
  *body.mutable_layout() = ToProto(transport::TestLayout());
  body.set_world_size(1);
  body.set_local_world_size(1);
  body.set_partition(v1::PARTITION_MODE_GREEDY);
  return request;
}

// Returns the input that has these messages, numbered from 1 on.
std::string Input(std::vector<v1::SessionRequest> requests) {
  std::string input;
  uint64_t id = 0;
  for (v1::SessionRequest& request : requests) {
    request.set_request_id(++id);
    input += FuzzString(request.SerializeAsString());
  }
  return input;
}

v1::SessionRequest AttachRequest() {
  v1::SessionRequest attach;
  attach.mutable_attach()->set_layout_hash(transport::TestLayout().hash());
  attach.mutable_attach()->set_client_instance(7);
  attach.mutable_attach()->set_takes_notices(true);
  return attach;
}

std::string StepInput() {
  v1::SessionRequest chunk, push, commit, read, detach;
  chunk.mutable_gradient_chunk()->set_offset_bytes(64);
  chunk.mutable_gradient_chunk()->set_data(std::string(100, 'g'));
  push.mutable_push()->set_step(1);
  push.mutable_push()->set_parameter_count(3);
  commit.mutable_commit()->set_step(1);
  commit.mutable_commit()->set_grad_scale(1);
  commit.mutable_commit()->set_wants_parameters(true);
  for (int i = 0; i < 2; ++i) {
    commit.mutable_commit()->add_groups()->add_values(0.001);
  }
  read.mutable_read_parameters();
  detach.mutable_detach();
  return Input(
      {RegisterRequest(), AttachRequest(), chunk, push, commit, read, detach});
}

std::string LoadInput() {
  v1::SessionRequest begin, load, finish, fetch, hint, abort, decide;
  begin.mutable_begin_load();
  load.mutable_load()->set_array(v1::STATE_ARRAY_MASTER);
  load.mutable_load()->set_dtype(v1::DTYPE_FLOAT32);
  load.mutable_load()->set_data(std::string(64, '\1'));
  finish.mutable_finish_load()->set_content_digest(1);
  fetch.mutable_fetch()->set_array(v1::STATE_ARRAY_PARAMETER);
  fetch.mutable_fetch()->set_numel(10);
  hint.mutable_parameter_hint()->set_kind(v1::ParameterHint::KIND_PREFETCH);
  hint.mutable_parameter_hint()->set_parameter_count(2);
  abort.mutable_abort()->set_step(1);
  decide.mutable_decide()->set_step(1);
  return Input({RegisterRequest(), AttachRequest(), begin, load, finish, fetch,
                hint, abort, decide});
}

}  // namespace

std::vector<std::string> Seeds() {
  v1::SessionRequest position, other;
  position.mutable_position();
  other = RegisterRequest();
  other.mutable_register_()->set_partition(v1::PARTITION_MODE_REPLICATED);
  other.mutable_register_()->set_accumulate(true);
  other.mutable_register_()->mutable_loss_scaler()->set_init_scale(1024);
  other.mutable_register_()->mutable_storage()->set_placement(
      v1::PLACEMENT_NVME);
  return {StepInput(), LoadInput(), Input({position, other})};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate::fuzz;
  FuzzInput input(data, size);
  Stream stream;
  for (int i = 0; i < kMessagesMax && !input.empty(); ++i) {
    const absl::Status taken = stream.Take(input.TakeString());
    stream.ReadReplies();
    if (!taken.ok()) break;
  }
  return 0;
}
