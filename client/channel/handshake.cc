#include "client/channel/handshake.h"

#include <unistd.h>

#include <fstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/channel/transport_error.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/interrupt.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"

namespace optstate::client {
namespace {

static_assert(static_cast<int>(JobPhase::kEmpty) == v1::JOB_PHASE_EMPTY);
static_assert(static_cast<int>(JobPhase::kLoading) == v1::JOB_PHASE_LOADING);
static_assert(static_cast<int>(JobPhase::kReady) == v1::JOB_PHASE_READY);
static_assert(static_cast<int>(JobPhase::kFailed) == v1::JOB_PHASE_FAILED);
static_assert(static_cast<int>(StateArray::kMaster) == v1::STATE_ARRAY_MASTER);
static_assert(static_cast<int>(StateArray::kStepCount) ==
              v1::STATE_ARRAY_STEP_COUNT);
static_assert(static_cast<int>(StateArray::kScalar) == v1::STATE_ARRAY_SCALAR);
static_assert(static_cast<int>(StateArray::kGradientNorm) ==
              v1::STATE_ARRAY_GRADIENT_NORM);
static_assert(static_cast<int>(StateArray::kPreparedSum) ==
              v1::STATE_ARRAY_PREPARED_SUM);

v1::JobAccess ToProto(const AccessOptions& access) {
  v1::JobAccess proto;
  proto.set_group(access.group);
  proto.set_is_private(access.is_private);
  *proto.mutable_readers() = {access.readers.begin(), access.readers.end()};
  return proto;
}

v1::Hello MakeHello(const Endpoint& endpoint, v1::Wire wire,
                    const std::string& job, bool must_exist,
                    const std::optional<AccessOptions>& access) {
  v1::Hello hello;
  hello.set_protocol_version_min(shm::kProtocolVersion);
  hello.set_protocol_version_max(shm::kProtocolVersion);
  hello.set_wire(wire);
  hello.set_job(job);
  hello.set_pid(getpid());
  hello.set_client_version(std::string(kVersion));
  hello.set_must_exist(must_exist);
  hello.set_token(TokenFor(endpoint));
  if (access.has_value()) *hello.mutable_access() = ToProto(*access);
  return hello;
}

// Makes the error of an absent daemon from that of a missing socket or host.
absl::Status NoDaemonError(const absl::Status& status) {
  if (!absl::IsNotFound(status) && !absl::IsUnavailable(status)) {
    return UnreachableError(status);
  }
  return UnreachableError(absl::UnavailableError(absl::StrCat(
      status.message(), "; start optstated there, or name another endpoint")));
}

// A certificate that is refused stays so, however often it is tried, and so
// does a daemon without TLS.
bool IsRefusedByTls(const Endpoint& endpoint, const absl::Status& status) {
  return endpoint.kind == Endpoint::Kind::kGrpcTls &&
         (absl::IsUnauthenticated(status) ||
          absl::IsFailedPrecondition(status) ||
          absl::IsInvalidArgument(status));
}

// A draining daemon is UNAVAILABLE permanently; a daemon whose last engine of
// this job is just going away says so in these words.
absl::Status Verdict(const absl::Status& status) {
  const bool again = absl::IsUnavailable(status) &&
                     absl::StrContains(status.message(), "connect again");
  return again ? TransportError(status) : status;
}

absl::Status Greet(int socket, const v1::Hello& hello, bool two_phase,
                   absl::Time deadline, const InterruptCheck& interrupted) {
  OPTSTATE_RETURN_IF_ERROR(TransportError(
      shm::SendFrame(socket, hello.SerializeAsString(), {}, deadline)));
  OPTSTATE_RETURN_IF_ERROR(AwaitReadable(socket, deadline, interrupted));
  absl::StatusOr<shm::Frame> frame =
      shm::ReceiveFrame(socket, shm::kHelloBytesMax, deadline);
  if (!frame.ok()) {
    const absl::Status status =
        Annotate(frame.status(), "the daemon did not answer the greeting");
    // A peer that answers in another protocol will do so again.
    return absl::IsInvalidArgument(status) ? status : TransportError(status);
  }
  v1::HelloReply reply;
  if (!reply.ParseFromString(frame->payload)) {
    return absl::InternalError("the daemon's greeting is not understood");
  }
  OPTSTATE_RETURN_IF_ERROR(Verdict(FromProto(reply.status())));
  if (reply.protocol_version() != shm::kProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon (", reply.server_version(),
                     ") speaks protocol version ", reply.protocol_version(),
                     ", this client (", kVersion, ") ", shm::kProtocolVersion));
  }
  if (two_phase &&
      (!reply.knows_two_phases() || !reply.knows_awaited_norms())) {
    return absl::UnimplementedError(absl::StrCat(
        "the daemon (", reply.server_version(),
        ") does not know steps of two phases as this client takes them, which "
        "a job on several nodes needs: upgrade it (optctl upgrade)"));
  }
  return absl::OkStatus();
}

// Returns an id that differs between machines and is equal in all containers of
// one machine.
std::string HostId() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

absl::Status OlderBuild(absl::string_view what) {
  return absl::UnimplementedError(absl::StrCat(
      "the daemon is of an older build, which takes no notice of ", what,
      ": upgrade it (optctl upgrade), delete the job if this session has made "
      "it, and try again"));
}

}  // namespace

absl::Status CheckFetches(const ChannelSetup& setup,
                          const v1::AttachReply& attached) {
  if (!setup.fetches_parameters || attached.parameters_are_fetched()) {
    return absl::OkStatus();
  }
  return OlderBuild("sessions that fetch parameters one by one");
}

absl::StatusOr<UniqueFd> OpenConnection(
    const Endpoint& endpoint, v1::Wire wire, const std::string& job,
    bool must_exist, bool two_phase, absl::Time deadline,
    const InterruptCheck& interrupted,
    const std::optional<AccessOptions>& access) {
  // A session that looks for a lost daemon calls this function repeatedly.
  OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
  absl::StatusOr<UniqueFd> socket = Dial(endpoint, deadline, interrupted);
  if (absl::IsCancelled(socket.status())) return socket.status();
  if (IsRefusedByTls(endpoint, socket.status())) return socket.status();
  if (!socket.ok()) return NoDaemonError(socket.status());
  OPTSTATE_RETURN_IF_ERROR(
      Greet(socket->get(), MakeHello(endpoint, wire, job, must_exist, access),
            two_phase, deadline, interrupted));
  return socket;
}

v1::StorageSettings ToProto(const StorageOptions& storage) {
  v1::StorageSettings proto;
  proto.set_placement(static_cast<v1::Placement>(storage.placement));
  proto.set_durability(static_cast<v1::DurabilityKind>(storage.durability));
  proto.set_host_budget_bytes(storage.host_budget_bytes);
  proto.set_sub_group_elements(storage.sub_group_elements);
  proto.set_every_steps(storage.durability_steps);
  proto.set_interval_ms(static_cast<uint32_t>(
      absl::ToInt64Milliseconds(storage.durability_interval)));
  proto.set_parameters_on_disk(storage.parameters_on_disk);
  proto.set_parameter_cache_bytes(storage.parameter_cache_bytes);
  if (storage.offload_fraction.has_value()) {
    proto.set_offload_fraction(*storage.offload_fraction);
  }
  proto.set_device_budget_bytes(storage.device_budget_bytes);
  return proto;
}

v1::RegisterRequest MakeRegister(const ChannelSetup& setup, bool comes_back) {
  v1::RegisterRequest request;
  *request.mutable_layout() = ToProto(setup.layout);
  request.set_rank(setup.rank);
  request.set_world_size(setup.world_size);
  request.set_host_id(HostId());
  request.set_local_world_size(setup.local_world_size);
  request.set_partition(static_cast<v1::PartitionMode>(setup.partition_mode));
  request.set_accumulate(setup.accumulate);
  request.set_accumulate_dtype(
      static_cast<v1::AccumulateDType>(setup.accumulate_dtype));
  request.set_speculative(setup.speculative);
  request.set_ephemeral(setup.ephemeral);
  request.set_extend(setup.extend);
  request.set_unchanged(comes_back);
  *request.mutable_storage() = ToProto(setup.storage);
  if (setup.loss_scaler.has_value()) {
    v1::LossScaler* const scaler = request.mutable_loss_scaler();
    scaler->set_dynamic(setup.loss_scaler->dynamic);
    scaler->set_init_scale(setup.loss_scaler->init_scale);
    scaler->set_growth_factor(setup.loss_scaler->growth_factor);
    scaler->set_backoff_factor(setup.loss_scaler->backoff_factor);
    scaler->set_growth_interval(setup.loss_scaler->growth_interval);
    scaler->set_hysteresis(setup.loss_scaler->hysteresis);
    scaler->set_min_scale(setup.loss_scaler->min_scale);
  }
  if (setup.loss_scaler_state.has_value()) {
    v1::LossScalerState* const state = request.mutable_loss_scaler_state();
    state->set_loss_scale(setup.loss_scaler_state->loss_scale);
    state->set_good_steps(setup.loss_scaler_state->good_steps);
    state->set_hysteresis_left(setup.loss_scaler_state->hysteresis_left);
  }
  return request;
}

v1::AttachRequest MakeAttach(const ChannelSetup& setup) {
  v1::AttachRequest request;
  request.set_rank(setup.rank);
  request.set_layout_hash(setup.layout.hash());
  request.set_client_instance(setup.client_instance);
  request.set_takes_notices(true);
  request.set_takes_run_stamps(!setup.fetches_parameters);
  request.set_fetches_parameters(setup.fetches_parameters);
  return request;
}

void FillCommit(const ChannelSetup& setup, const CommitOptions& options,
                v1::CommitRequest* commit) {
  commit->Clear();
  commit->set_step(options.step);
  commit->set_grad_scale(options.grad_scale);
  commit->set_max_norm(options.max_norm);
  commit->set_found_inf(options.found_inf);
  commit->set_max_value(options.max_value);
  commit->set_norm_type(options.norm_type);
  commit->set_two_phase(setup.two_phase);
  commit->set_awaits_norm(options.awaits_norm);
  // A prepared step has none yet.
  commit->set_wants_parameters(!setup.fetches_parameters && !setup.two_phase);
  for (size_t i = 0; i < options.groups.size(); ++i) {
    const Hyperparams& from = options.groups[i];
    v1::GroupHyperparams* const to = commit->add_groups();
    to->mutable_values()->Add(from.value.begin(), from.value.end());
    to->set_max_norm(from.max_norm);
    if (!options.clips_with.empty()) to->set_clips_with(options.clips_with[i]);
  }
}

v1::DecideRequest MakeDecision(const StepVerdict& verdict) {
  v1::DecideRequest request;
  request.set_step(verdict.step);
  request.set_digest(verdict.digest);
  request.set_verdict(static_cast<v1::DecideRequest::Verdict>(verdict.verdict));
  if (verdict.verdict == Verdict::kClip) {
    request.set_gradient_norm(verdict.gradient_norm);
    request.set_clip_coefficient(verdict.clip_coefficient);
  }
  return request;
}

v1::DetachRequest MakeFarewell(const ChannelSetup& setup) {
  v1::DetachRequest request;
  request.set_rank(setup.rank);
  request.set_client_instance(setup.client_instance);
  return request;
}

absl::StatusOr<Attached> MakeAttached(const ChannelSetup& setup,
                                      const v1::RegisterReply& registered,
                                      const v1::AttachReply& attached) {
  if (registered.layout_hash() != setup.layout.hash()) {
    return absl::InternalError(
        "client and daemon disagree about the hash of one layout");
  }
  OPTSTATE_RETURN_IF_ERROR(CheckFetches(setup, attached));
  const uint64_t area =
      setup.fetches_parameters ? 0 : setup.layout.parameter_area_bytes();
  if (attached.parameter_bytes() != area) {
    return absl::InternalError(absl::StrCat(
        "the daemon's parameter area has ", attached.parameter_bytes(),
        " bytes where the layout needs ", area));
  }
  if (setup.speculative && !attached.speculates()) {
    return absl::UnimplementedError(
        "the daemon is of an older build, which takes no notice of "
        "speculative: upgrade it (optctl upgrade), or leave speculative out");
  }
  const bool asks_for_storage = setup.storage.placement > Placement::kHost ||
                                setup.storage.durability > Durability::kNone ||
                                setup.storage.sub_group_elements != 0;
  if (asks_for_storage && !registered.has_storage()) {
    return absl::UnimplementedError(
        "the daemon is of an older build, which takes no notice of placement, "
        "durability and sub_group_size: upgrade it (optctl upgrade), delete "
        "the job if this session has made it, and try again");
  }
  // Absent in the reply of a job that PLACEMENT_AUTO has put into memory too.
  if (setup.storage.parameters_on_disk &&
      registered.storage().placement() == v1::PLACEMENT_NVME &&
      !registered.storage().parameters_on_disk()) {
    return OlderBuild("parameters on disk");
  }
  if (setup.storage.offload_fraction.value_or(1) != 1 &&
      !registered.storage().has_offload_fraction()) {
    return OlderBuild("offload_fraction");
  }
  // An operator may have changed what the job was made with, to 0 too.
  if (setup.storage.device_budget_bytes != 0 &&
      registered.storage().device_budget_bytes() == 0 &&
      registered.storage().made_with().device_budget_bytes() == 0) {
    return OlderBuild("device_budget");
  }
  Attached result;
  result.committed_step = attached.committed_step();
  result.phase = static_cast<JobPhase>(attached.phase());
  result.created = registered.created();
  result.loss_scaler = {.loss_scale = attached.loss_scale(),
                        .good_steps = attached.good_steps(),
                        .hysteresis_left = attached.hysteresis_left()};
  result.load_required_from = attached.load_required_from();
  result.speculates = attached.speculates();
  result.gradients_present = attached.gradients_present();
  result.takes_begin_at = attached.takes_begin_at();
  if (attached.has_loads_finished()) {
    result.loads_finished = attached.loads_finished();
  }
  if (attached.has_last_outcome()) {
    result.last_outcome = FromProto(attached.last_outcome());
  }
  uint64_t next = 0;
  for (const v1::StagedRange& range : attached.staged()) {
    const uint64_t end = uint64_t{range.first_piece()} + range.piece_count();
    if (range.first_piece() < next || end > setup.partition.pieces.size()) {
      return absl::InternalError(absl::StrCat(
          "the daemon says that pieces [", range.first_piece(), ", ", end,
          ") are staged, this rank has ", setup.partition.pieces.size()));
    }
    next = end;
    result.staged.push_back({.first = range.first_piece(),
                             .count = range.piece_count(),
                             .micro_step = range.micro_step()});
  }
  return result;
}

}  // namespace optstate::client
