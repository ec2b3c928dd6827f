#include "client/channel/grpc/grpc_channel.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/channel/grpc/anonymous_memory.h"
#include "client/channel/grpc/grpc_stream.h"
#include "client/channel/handshake.h"
#include "client/channel/transport_error.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// The most requests without an answer; further requests wait.
constexpr size_t kPendingMax = 1024;
// The most fetches, and their bytes, that are requested ahead: enough to hide
// the round trip, at little memory on either side.
constexpr size_t kFetchesAheadMax = 256;
constexpr uint64_t kFetchBytesAhead = 4 * shm::kChunkBytesMax;
constexpr absl::Duration kDetachTimeout = absl::Seconds(5);

// Size: one method for each call of Channel; the stream does the work.
class GrpcChannel final : public Channel {
 public:
  GrpcChannel(Endpoint endpoint, ChannelSetup setup)
      : endpoint_(std::move(endpoint)), setup_(std::move(setup)) {}
  ~GrpcChannel() override { Disconnect().IgnoreError(); }

  absl::string_view wire() const override { return "grpc"; }
  absl::StatusOr<Attached> Connect(bool must_exist,
                                   absl::Time deadline) override;
  bool connected() const override { return stream_ != nullptr; }
  absl::Status Disconnect() override;
  absl::Status Farewell(absl::Time deadline) override;
  void Abandon() override {
    if (stream_ != nullptr) stream_->Abandon();
    static_cast<void>(stream_.release());
  }

  absl::Span<std::byte> gradient_area() override { return gradients_->bytes(); }
  bool releases_gradients() const override { return setup_.fetches_parameters; }
  void ReleaseGradients(uint64_t begin, uint64_t end) override {
    if (releases_gradients()) gradients_->Release(begin, end);
  }
  absl::Span<const std::byte> parameter_area() const override {
    return parameters_.bytes();
  }

  absl::Status Push(const PushRange& range, absl::Time deadline) override;
  absl::Status Flush(absl::Time deadline) override;
  absl::Status StartCommit(const CommitOptions& options,
                           absl::Time deadline) override;
  absl::StatusOr<Outcome> WaitCommit(absl::Time deadline,
                                     Meanwhile meanwhile) override;
  absl::Status Abort(uint64_t step, absl::Time deadline) override;
  absl::Status StartDecision(const StepVerdict& verdict,
                             absl::Time deadline) override;
  bool has_outstanding_commit() const override { return commit_id_ != 0; }
  absl::StatusOr<v1::SessionReply> Ask(const v1::SessionRequest& request,
                                       absl::Time deadline) override;

  uint64_t transfer_bytes_max() const override { return shm::kChunkBytesMax; }
  absl::Status BeginLoad(absl::Time deadline) override;
  absl::Status Load(StateArray array, uint32_t parameter, uint64_t begin,
                    DType dtype, absl::Span<const std::byte> data,
                    absl::Time deadline) override;
  absl::Status FinishLoad(const LoadEnd& end, absl::Time deadline) override;
  absl::StatusOr<uint64_t> Fetch(absl::Span<const FetchRange> ranges,
                                 absl::Time deadline) override;
  absl::Status HintParameters(ParameterHint hint, uint32_t first,
                              uint32_t count, absl::Time deadline) override;

 private:
  enum class Kind { kAwaited, kPush, kLoad };
  struct Pending {
    Kind kind = Kind::kAwaited;
    uint64_t step = 0;                      // kPush
    std::optional<v1::SessionReply> reply;  // kAwaited
  };

  absl::StatusOr<uint64_t> SendFetch(const FetchRange& range,
                                     absl::Time deadline);
  absl::StatusOr<uint64_t> TakeFetch(uint64_t request_id,
                                     const FetchRange& range,
                                     absl::Time deadline);
  absl::Status Open(bool must_exist, absl::Time deadline);
  absl::StatusOr<Attached> Join(bool comes_back, absl::Time deadline);
  absl::Status SendGradients(uint64_t begin, uint64_t end, absl::Time deadline);
  absl::Status ReadParameters(absl::Time deadline);
  absl::Status CopyChunk(const v1::ParameterChunk& chunk);

  // Sends request_ under a new id, which it returns.
  absl::StatusOr<uint64_t> Send(const Pending& pending, absl::Time deadline);
  absl::StatusOr<v1::SessionReply> Await(uint64_t request_id,
                                         absl::Time deadline);
  absl::StatusOr<v1::SessionReply> SendAndAwait(absl::Time deadline);
  // Waits until `done` returns true and checks `interrupted`; after CANCELLED
  // nothing is lost.
  absl::Status WaitUntil(absl::FunctionRef<bool()> done, absl::Time deadline,
                         const InterruptCheck& interrupted = nullptr);
  absl::Status Record(v1::SessionReply reply);
  absl::Status Lose(const absl::Status& status);

  const Endpoint endpoint_;
  const ChannelSetup setup_;
  // Shared with messages that gRPC has not sent yet.
  const std::shared_ptr<AnonymousMemory> gradients_ =
      std::make_shared<AnonymousMemory>();
  AnonymousMemory parameters_;
  bool allocated_ = false;
  bool mixed_parameters_ = false;

  std::unique_ptr<GrpcStream> stream_;
  v1::SessionRequest request_;  // reused
  uint64_t last_request_id_ = 0;
  absl::flat_hash_map<uint64_t, Pending> pending_;
  size_t pending_pushes_ = 0;
  size_t pending_loads_ = 0;
  absl::Status failed_load_;  // the first error, until it is reported
  uint64_t commit_id_ = 0;
};

absl::StatusOr<Attached> GrpcChannel::Connect(bool must_exist,
                                              absl::Time deadline) {
  Lose(absl::OkStatus()).IgnoreError();
  if (!allocated_) {
    OPTSTATE_RETURN_IF_ERROR(
        gradients_->Allocate(setup_.partition.gradient_area_bytes));
    if (!setup_.fetches_parameters) {
      OPTSTATE_RETURN_IF_ERROR(
          parameters_.Allocate(setup_.layout.parameter_area_bytes()));
    }
    allocated_ = true;
  }
  OPTSTATE_RETURN_IF_ERROR(Open(must_exist, deadline));
  absl::StatusOr<Attached> attached = Join(must_exist, deadline);
  if (!attached.ok()) return Lose(attached.status());
  return attached;
}

absl::Status GrpcChannel::Open(bool must_exist, absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(
      UniqueFd socket, OpenConnection(endpoint_, v1::WIRE_GRPC, setup_.job,
                                      must_exist, setup_.two_phase, deadline,
                                      setup_.interrupted, setup_.access));
  OPTSTATE_ASSIGN_OR_RETURN(
      stream_,
      GrpcStream::Open(std::move(socket), deadline, setup_.interrupted));
  return absl::OkStatus();
}

absl::StatusOr<Attached> GrpcChannel::Join(bool comes_back,
                                           absl::Time deadline) {
  *request_.mutable_register_() = MakeRegister(setup_, comes_back);
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionReply registered,
                            SendAndAwait(deadline));
  *request_.mutable_attach() = MakeAttach(setup_);
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionReply attached,
                            SendAndAwait(deadline));
  OPTSTATE_ASSIGN_OR_RETURN(
      Attached result,
      MakeAttached(setup_, registered.register_(), attached.attach()));
  if (result.phase == JobPhase::kReady) {
    OPTSTATE_RETURN_IF_ERROR(ReadParameters(deadline));
  }
  return result;
}

absl::Status GrpcChannel::Disconnect() {
  if (!connected()) return NotConnectedError();
  request_.mutable_detach();
  // The answer only confirms that the rank is free; the end of the stream also
  // tells a live engine that the rank leaves.
  return Lose(SendAndAwait(absl::Now() + kDetachTimeout).status());
}

absl::Status GrpcChannel::Farewell(absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(Open(/*must_exist=*/true, deadline));
  *request_.mutable_detach() = MakeFarewell(setup_);
  return Lose(SendAndAwait(deadline).status());
}

absl::Status GrpcChannel::Lose(const absl::Status& status) {
  stream_.reset();
  pending_.clear();
  pending_pushes_ = 0;
  pending_loads_ = 0;
  failed_load_ = absl::OkStatus();
  commit_id_ = 0;
  return status;
}

absl::Status GrpcChannel::Push(const PushRange& range, absl::Time deadline) {
  const RankPartition& partition = setup_.partition;
  const size_t first = partition.LowerBound(range.first_parameter);
  const size_t end =
      partition.LowerBound(range.first_parameter + range.parameter_count);
  if (first < end && !range.is_there) {
    // Pieces lie one after another in the area.
    const Piece& last = partition.pieces[end - 1];
    const DType dtype =
        setup_.layout.parameters()[last.parameter].gradient_dtype;
    OPTSTATE_RETURN_IF_ERROR(SendGradients(
        partition.pieces[first].gradient_offset_bytes,
        last.gradient_offset_bytes + last.numel * SizeInBytes(dtype),
        deadline));
  }
  v1::PushRequest* const push = request_.mutable_push();
  push->set_step(range.step);
  push->set_micro_step(range.micro_step);
  push->set_first_parameter(range.first_parameter);
  push->set_parameter_count(range.parameter_count);
  return Send({.kind = Kind::kPush, .step = range.step, .reply = {}}, deadline)
      .status();
}

absl::Status GrpcChannel::SendGradients(uint64_t begin, uint64_t end,
                                        absl::Time deadline) {
  if (!connected()) return NotConnectedError();
  for (uint64_t at = begin; at < end; at += shm::kChunkBytesMax) {
    const uint64_t bytes = std::min<uint64_t>(shm::kChunkBytesMax, end - at);
    // A chunk is answered by the push that it belongs to, which is the next
    // request.
    const absl::Status written = stream_->WriteChunk(
        last_request_id_ + 1, at, gradients_->bytes().subspan(at, bytes),
        gradients_, deadline);
    if (!written.ok()) return Lose(written);
  }
  return absl::OkStatus();
}

absl::Status GrpcChannel::Flush(absl::Time deadline) {
  return WaitUntil([this] { return pending_pushes_ == 0; }, deadline,
                   setup_.interrupted);
}

absl::Status GrpcChannel::StartCommit(const CommitOptions& options,
                                      absl::Time deadline) {
  FillCommit(setup_, options, request_.mutable_commit());
  OPTSTATE_ASSIGN_OR_RETURN(commit_id_, Send({}, deadline));
  return absl::OkStatus();
}

absl::StatusOr<Outcome> GrpcChannel::WaitCommit(absl::Time deadline,
                                                Meanwhile /*meanwhile*/) {
  if (commit_id_ == 0) {
    return absl::FailedPreconditionError("no commit was started");
  }
  OPTSTATE_RETURN_IF_ERROR(
      WaitUntil([this] { return pending_.at(commit_id_).reply.has_value(); },
                deadline, setup_.interrupted));
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionReply reply,
                            Await(std::exchange(commit_id_, 0), deadline));
  const Outcome outcome = FromProto(reply.outcome());
  if (outcome.prepared) return outcome;
  if (outcome.applied && !reply.has_parameters()) {
    OPTSTATE_RETURN_IF_ERROR(ReadParameters(deadline));
  }
  mixed_parameters_ = false;
  return outcome;
}

absl::Status GrpcChannel::Abort(uint64_t step, absl::Time deadline) {
  request_.mutable_abort()->set_step(step);
  return SendAndAwait(deadline).status();
}

absl::Status GrpcChannel::StartDecision(const StepVerdict& verdict,
                                        absl::Time deadline) {
  *request_.mutable_decide() = MakeDecision(verdict);
  OPTSTATE_ASSIGN_OR_RETURN(commit_id_, Send({}, deadline));
  return absl::OkStatus();
}

absl::StatusOr<v1::SessionReply> GrpcChannel::Ask(
    const v1::SessionRequest& request, absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(Open(/*must_exist=*/true, deadline));
  request_ = request;
  absl::StatusOr<v1::SessionReply> reply = SendAndAwait(deadline);
  Lose(absl::OkStatus()).IgnoreError();
  return reply;
}

absl::Status GrpcChannel::BeginLoad(absl::Time deadline) {
  request_.mutable_begin_load();
  absl::Status status = SendAndAwait(deadline).status();
  failed_load_ = absl::OkStatus();  // drop the error of an earlier load
  return status;
}

absl::Status GrpcChannel::Load(StateArray array, uint32_t parameter,
                               uint64_t begin, DType dtype,
                               absl::Span<const std::byte> data,
                               absl::Time deadline) {
  v1::LoadRequest* const load = request_.mutable_load();
  load->set_array(static_cast<v1::StateArray>(array));
  load->set_parameter(parameter);
  load->set_begin(begin);
  load->set_dtype(static_cast<v1::DType>(dtype));
  load->set_data(data.data(), data.size());
  OPTSTATE_RETURN_IF_ERROR(
      Send({.kind = Kind::kLoad, .step = 0, .reply = {}}, deadline).status());
  return std::exchange(failed_load_, absl::OkStatus());
}

absl::Status GrpcChannel::FinishLoad(const LoadEnd& end, absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(
      WaitUntil([this] { return pending_loads_ == 0; }, deadline));
  OPTSTATE_RETURN_IF_ERROR(std::exchange(failed_load_, absl::OkStatus()));
  v1::FinishLoadRequest* const finish = request_.mutable_finish_load();
  finish->set_content_digest(end.content_digest);
  const BeginAt at = end.begin_at.value_or(BeginAt{0, 0});  // none
  finish->set_begin_at_step(at.step);
  finish->set_begin_at_loads(at.loads_finished);
  OPTSTATE_RETURN_IF_ERROR(SendAndAwait(deadline).status());
  return ReadParameters(deadline);
}

// Sends requests ahead of the answers, which come in the same order.
absl::StatusOr<uint64_t> GrpcChannel::Fetch(absl::Span<const FetchRange> ranges,
                                            absl::Time deadline) {
  uint64_t step = 0;
  for (size_t begin = 0; begin < ranges.size();) {
    std::vector<uint64_t> ids;
    uint64_t bytes = 0;
    while (begin + ids.size() < ranges.size() &&
           ids.size() < kFetchesAheadMax && bytes < kFetchBytesAhead) {
      const FetchRange& range = ranges[begin + ids.size()];
      OPTSTATE_ASSIGN_OR_RETURN(const uint64_t id, SendFetch(range, deadline));
      ids.push_back(id);
      bytes += range.out.size();
    }
    // All answers are taken, also after an error, so that none is left behind.
    absl::Status status;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto taken = TakeFetch(ids[i], ranges[begin + i], deadline);
      if (!connected()) return taken.status();
      status.Update(taken.status());
      if (taken.ok()) step = *taken;
    }
    OPTSTATE_RETURN_IF_ERROR(status);
    begin += ids.size();
  }
  return step;
}

absl::StatusOr<uint64_t> GrpcChannel::SendFetch(const FetchRange& range,
                                                absl::Time deadline) {
  v1::FetchRequest* const fetch = request_.mutable_fetch();
  fetch->set_array(static_cast<v1::StateArray>(range.array));
  fetch->set_parameter(range.parameter);
  fetch->set_begin(range.begin);
  fetch->set_numel(range.out.size() / range.element_bytes);
  return Send({}, deadline);
}

absl::StatusOr<uint64_t> GrpcChannel::TakeFetch(uint64_t request_id,
                                                const FetchRange& range,
                                                absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionReply reply,
                            Await(request_id, deadline));
  const std::string& data = reply.fetch().data();
  if (data.size() != range.out.size()) {
    return absl::InternalError(absl::StrCat("the engine sent ", data.size(),
                                            " bytes of ", range.out.size()));
  }
  std::memcpy(range.out.data(), data.data(), data.size());
  return reply.fetch().step();
}

absl::Status GrpcChannel::HintParameters(ParameterHint hint, uint32_t first,
                                         uint32_t count, absl::Time deadline) {
  v1::ParameterHint* const message = request_.mutable_parameter_hint();
  message->set_kind(static_cast<v1::ParameterHint::Kind>(hint));
  message->set_first_parameter(first);
  message->set_parameter_count(count);
  return SendAndAwait(deadline).status();
}

absl::Status GrpcChannel::ReadParameters(absl::Time deadline) {
  if (setup_.fetches_parameters) return absl::OkStatus();
  request_.mutable_read_parameters();
  OPTSTATE_RETURN_IF_ERROR(SendAndAwait(deadline).status());
  mixed_parameters_ = false;
  return absl::OkStatus();
}

absl::Status GrpcChannel::CopyChunk(const v1::ParameterChunk& chunk) {
  const absl::Span<std::byte> area = parameters_.bytes();
  const uint64_t offset = chunk.offset_bytes();
  if (offset > area.size() || chunk.data().size() > area.size() - offset) {
    return absl::InternalError(absl::StrCat(
        "the engine sent parameters [", offset, ", +", chunk.data().size(),
        ") of an area of ", area.size(), " bytes"));
  }
  if (!chunk.data().empty()) {
    mixed_parameters_ = true;
    std::memcpy(area.data() + offset, chunk.data().data(), chunk.data().size());
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> GrpcChannel::Send(const Pending& pending,
                                           absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(
      WaitUntil([this] { return pending_.size() < kPendingMax; }, deadline));
  const uint64_t id = ++last_request_id_;
  request_.set_request_id(id);
  if (pending.kind == Kind::kPush) ++pending_pushes_;
  if (pending.kind == Kind::kLoad) ++pending_loads_;
  pending_.emplace(id, pending);
  const absl::Status written = stream_->Write(request_, deadline);
  if (!written.ok()) return Lose(written);
  return id;
}

absl::StatusOr<v1::SessionReply> GrpcChannel::Await(uint64_t request_id,
                                                    absl::Time deadline) {
  OPTSTATE_RETURN_IF_ERROR(WaitUntil(
      [&] { return pending_.at(request_id).reply.has_value(); }, deadline));
  v1::SessionReply reply = *std::move(pending_.at(request_id).reply);
  pending_.erase(request_id);
  OPTSTATE_RETURN_IF_ERROR(FromProto(reply.status()));
  return reply;
}

absl::StatusOr<v1::SessionReply> GrpcChannel::SendAndAwait(
    absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t id, Send({}, deadline));
  return Await(id, deadline);
}

absl::Status GrpcChannel::WaitUntil(absl::FunctionRef<bool()> done,
                                    absl::Time deadline,
                                    const InterruptCheck& interrupted) {
  if (!connected()) return NotConnectedError();
  while (!done()) {
    absl::StatusOr<v1::SessionReply> reply =
        stream_->Read(deadline, interrupted);
    if (absl::IsCancelled(reply.status())) return reply.status();
    if (!reply.ok()) return Lose(reply.status());
    const absl::Status status = Record(*std::move(reply));
    if (!status.ok()) return Lose(status);
  }
  return absl::OkStatus();
}

// Files a reply under its request. An error: the engine broke the protocol.
absl::Status GrpcChannel::Record(v1::SessionReply reply) {
  if (reply.has_notice()) {
    setup_.notice(reply.notice().text());
    return absl::OkStatus();
  }
  const auto found = pending_.find(reply.request_id());
  if (found == pending_.end() || found->second.reply) {
    return absl::InternalError(absl::StrCat("the engine answered request ",
                                            reply.request_id(),
                                            ", which is not open"));
  }
  if (reply.has_parameter_chunk()) return CopyChunk(reply.parameter_chunk());
  if (found->second.kind == Kind::kAwaited) {
    found->second.reply = std::move(reply);
    return absl::OkStatus();
  }
  absl::Status status = FromProto(reply.status());
  if (found->second.kind == Kind::kPush) {
    --pending_pushes_;
    if (!status.ok()) NoteFailedPush(found->second.step, std::move(status));
  } else {
    --pending_loads_;
    failed_load_.Update(std::move(status));
  }
  pending_.erase(found);
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<Channel> MakeGrpcChannel(Endpoint endpoint,
                                         ChannelSetup setup) {
  return std::make_unique<GrpcChannel>(std::move(endpoint), std::move(setup));
}

}  // namespace optstate::client
