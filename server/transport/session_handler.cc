#include "server/transport/session_handler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/shm/frame.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/conversions.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/os/process_stat.h"
#include "server/transport/transfer_range.h"
#include "spdlog/spdlog.h"

namespace optstate::transport {
namespace {

// How long a new session waits for its rank while the last step of a dead one
// is being applied.
constexpr absl::Duration kTakeoverPatience = absl::Seconds(60);

absl::StatusOr<session::RegisterSpec> RegisterSpecFrom(
    const v1::RegisterRequest& request) {
  OPTSTATE_ASSIGN_OR_RETURN(Layout layout, LayoutFromProto(request.layout()));
  OPTSTATE_ASSIGN_OR_RETURN(const PartitionMode partition,
                            PartitionModeFromProto(request.partition()));
  OPTSTATE_ASSIGN_OR_RETURN(
      const AccumulateDType accumulate_dtype,
      AccumulateDTypeFromProto(request.accumulate_dtype()));
  return session::RegisterSpec{
      .layout = std::move(layout),
      .rank = request.rank(),
      .world_size = request.world_size(),
      .host_id = request.host_id(),
      .local_world_size = request.local_world_size(),
      .partition = partition,
      .accumulate = request.accumulate(),
      .ephemeral = request.ephemeral(),
      .extend = request.extend(),
      .loss_scaler = request.has_loss_scaler()
                         ? std::make_optional(request.loss_scaler())
                         : std::nullopt,
      .accumulate_dtype = accumulate_dtype,
      .process = {},
      .unchanged = request.unchanged(),
      .loss_scaler_state = request.has_loss_scaler_state()
                               ? std::make_optional(request.loss_scaler_state())
                               : std::nullopt,
      .storage = request.storage(),
      .speculative = request.speculative()};
}

session::RankProcess ProcessOf(const Peer& peer) {
  session::RankProcess process{.pid = static_cast<pid_t>(peer.pid)};
  if (process.pid == 0) return process;
  const absl::StatusOr<os::ProcessStat> stat = os::ReadProcessStat(process.pid);
  if (stat.ok()) process.start_ticks = stat->start_ticks;
  return process;
}

session::WireCounters::Counts* CountsOf(const SessionTable& table,
                                        absl::string_view wire) {
  session::WireCounters* const wires = table.observers().wires;
  return wires == nullptr ? nullptr : wires->Of(wire);
}

}  // namespace

Verdict VerdictOf(int64_t number) {
  const bool is_known = number == static_cast<int64_t>(Verdict::kCommit) ||
                        number == static_cast<int64_t>(Verdict::kSkip) ||
                        number == static_cast<int64_t>(Verdict::kAbort) ||
                        number == static_cast<int64_t>(Verdict::kClip);
  return is_known ? static_cast<Verdict>(number) : Verdict{0};
}

StepVerdict VerdictFrom(const v1::DecideRequest& request) {
  return {.step = request.step(),
          .digest = request.digest(),
          .verdict = VerdictOf(request.verdict()),
          .gradient_norm = request.gradient_norm(),
          .clip_coefficient = request.clip_coefficient()};
}

SessionHandler::SessionHandler(Options options, Peer peer, const PeerLink* link)
    : options_(std::move(options)),
      peer_(std::move(peer)),
      link_(link),
      traffic_(CountsOf(*options_.table, options_.wire)) {}

SessionHandler::~SessionHandler() { Detach("session destroyed"); }

std::string SessionHandler::Name() const {
  std::string name = absl::StrCat("job=", peer_.hello.job());
  if (attached_) absl::StrAppend(&name, " rank=", rank_);
  absl::StrAppend(&name, " pid=", peer_.pid, " uid=", peer_.uid,
                  " wire=", options_.wire);
  return name;
}

void SessionHandler::LogOutcome(const absl::Status& status,
                                const session::StepOutcome& outcome) const {
  // Loads are answered in the same way, with step 0.
  if (!status.ok() || outcome.step == 0 || outcome.applied || rank_ != 0) {
    return;
  }
  observe::LogRepeated(
      spdlog::level::info, "step skipped",
      absl::StrCat("job ", peer_.hello.job()),
      "step skipped: job={} step={} found_inf={} gradient_norm={}",
      peer_.hello.job(), outcome.step, outcome.found_inf,
      outcome.gradient_norm);
}

absl::StatusOr<v1::RegisterReply> SessionHandler::Register(
    const v1::RegisterRequest& request) {
  OPTSTATE_ASSIGN_OR_RETURN(session::RegisterSpec spec,
                            RegisterSpecFrom(request));
  spec.process = ProcessOf(peer_);
  comes_back_ = spec.unchanged;
  absl::MutexLock lock(&options_.table->registration());
  OPTSTATE_ASSIGN_OR_RETURN(const session::RegisterResult result,
                            options_.job->Register(spec));
  shape_ = result.shape;
  if (result.created) {
    spdlog::info(
        "job registered: {} parameters={} elements={} groups={} world_size={}",
        Name(), spec.layout.parameters().size(), spec.layout.element_count(),
        spec.layout.groups().size(), spec.world_size);
  }
  v1::RegisterReply reply;
  reply.set_layout_hash(result.layout_hash);
  reply.set_committed_step(result.committed_step);
  reply.set_phase(result.phase);
  reply.set_created(result.created);
  *reply.mutable_storage() = result.storage;
  return reply;
}

absl::StatusOr<AttachPlan> SessionHandler::PlanAttach(
    const v1::AttachRequest& request) {
  if (attached_) {
    return absl::FailedPreconditionError(
        absl::StrCat("this session is attached as rank ", rank_, " already"));
  }
  if (shape_ == 0) {
    return absl::FailedPreconditionError(
        "attach before register: the session has not registered its job");
  }
  absl::MutexLock lock(&options_.table->registration());
  OPTSTATE_ASSIGN_OR_RETURN(const Layout* layout, options_.job->layout());
  if (request.layout_hash() != layout->hash()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the job's layout is ", absl::BytesToHexString(layout->hash()),
        ", attach names ", absl::BytesToHexString(request.layout_hash()),
        "; register first"));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const RankPartition* partition,
                            options_.job->partition(request.rank()));
  AttachPlan plan;
  plan.rank = request.rank();
  plan.client_instance = request.client_instance();
  plan.takes_notices = request.takes_notices();
  plan.layout_hash = layout->hash();
  plan.group_count = layout->groups().size();
  plan.gradient_area_bytes = partition->gradient_area_bytes;
  const bool has_lead =
      peer_.hello.protocol_version_max() >= shm::kGradientLeadProtocol;
  plan.client_segment_version = has_lead
                                    ? shm::kClientSegmentVersion
                                    : shm::kClientSegmentVersionWithoutLead;
  plan.gradient_lead_bytes = has_lead ? shm::GradientLeadBytes(plan.rank) : 0;
  plan.pages_follow = request.pages_follow();
  if (plan.pages_follow) {
    plan.gradient_ends = GradientEnds(*layout, *partition);
  }
  plan.fetches_parameters = request.fetches_parameters();
  if (plan.fetches_parameters) return plan;
  plan.parameter_area_bytes = layout->parameter_area_bytes();
  OPTSTATE_ASSIGN_OR_RETURN(plan.parameters, options_.job->OpenParameters());
  OPTSTATE_ASSIGN_OR_RETURN(plan.run_stamps, options_.job->OpenRunStamps());
  plan.run_count = layout->run_count();
  plan.parts = AreaParts(*layout, shm::kChunkBytesMax);
  return plan;
}

absl::Status SessionHandler::Claim(const AttachPlan& plan) {
  OPTSTATE_RETURN_IF_ERROR(
      options_.table->Claim(plan.rank,
                            {.link = link_,
                             .interrupt = options_.interrupt,
                             .pid = PeerPid(),
                             .wire = options_.wire,
                             .client_instance = plan.client_instance,
                             .queues = &options_.queues},
                            kTakeoverPatience));
  claimed_ = true;
  rank_ = plan.rank;
  return absl::OkStatus();
}

void SessionHandler::Unclaim() {
  if (!claimed_) return;
  claimed_ = false;
  options_.table->Release(rank_);
}

absl::StatusOr<v1::AttachReply> SessionHandler::Attach(
    const AttachPlan& plan, const std::byte* gradient_area,
    session::SessionListener* listener) {
  session::AttachSpec spec{
      .rank = plan.rank,
      .layout_hash = plan.layout_hash,
      .shape = shape_,
      .gradient_area = gradient_area,
      .gradient_area_bytes = plan.gradient_area_bytes,
      .listener = listener,
      .client_instance = plan.client_instance,
      .comes_back = comes_back_,
      .gradients_present = plan.gradients_present,
      .gradient_segment = plan.gradient_segment.get(),
      .gradient_offset_bytes = plan.gradient_offset_bytes,
      .gradient_bytes_present = plan.gradient_bytes_present,
      .pid = PeerPid(),
      .process = ProcessOf(peer_),
      .uid = peer_.uid,
      .wire = options_.wire,
      .client_version = peer_.hello.client_version()};
  takes_notices_ = plan.takes_notices;  // the listener may get one at once
  fetches_parameters_ = plan.fetches_parameters;
  NoteTraffic(plan);
  const absl::StatusOr<session::AttachResult> result =
      options_.job->Attach(spec);
  if (!result.ok()) return result.status();
  attached_ = true;
  observe::LogOfPeer(
      spdlog::level::info, "session attached", absl::StrCat("uid ", peer_.uid),
      "session attached: {} client=\"{}\" step={}", Name(),
      absl::CHexEscape(peer_.hello.client_version()), result->committed_step);
  v1::AttachReply reply;
  reply.set_committed_step(result->committed_step);
  reply.set_phase(result->phase);
  reply.set_parameter_bytes(plan.parameter_area_bytes);
  if (result->has_last_outcome) {
    *reply.mutable_last_outcome() = ToProto(result->last_outcome);
  }
  reply.set_loss_scale(result->loss_scale);
  reply.set_good_steps(result->good_steps);
  reply.set_hysteresis_left(result->hysteresis_left);
  reply.set_loads_finished(result->loads_finished);
  reply.set_load_required_from(result->load_required_from);
  reply.set_speculates(result->speculates);
  reply.set_parameters_are_fetched(plan.fetches_parameters);
  reply.set_gradients_present(plan.gradients_present);
  reply.set_takes_begin_at(true);
  for (const session::StagedRange& range : result->staged) {
    v1::StagedRange* staged = reply.add_staged();
    staged->set_first_piece(range.first_piece);
    staged->set_piece_count(range.piece_count);
    staged->set_micro_step(range.micro_step);
  }
  return reply;
}

void SessionHandler::NoteTraffic(const AttachPlan& plan) {
  absl::MutexLock lock(&options_.table->registration());
  const absl::StatusOr<const Layout*> layout = options_.job->layout();
  const absl::StatusOr<const RankPartition*> partition =
      options_.job->partition(plan.rank);
  if (!layout.ok() || !partition.ok()) return;  // the attach says why
  traffic_.Attach(**layout, **partition, plan.parameter_area_bytes);
}

void SessionHandler::Detach(absl::string_view reason) {
  if (!attached_) return Unclaim();
  options_.job->Detach(rank_);
  observe::LogOfPeer(spdlog::level::info, "session detached",
                     absl::StrCat("uid ", peer_.uid),
                     "session detached: {} reason=\"{}\"", Name(),
                     fmt::string_view(reason.data(), reason.size()));
  attached_ = false;
  const auto& on_lost = options_.table->observers().on_lost;
  if (!leaves_ && on_lost != nullptr) on_lost(rank_, reason);
  Unclaim();
}

void SessionHandler::Leave(const v1::DetachRequest& request) {
  if (attached_) {
    leaves_ = true;
    options_.job->Leave(rank_);  // and the rest, which is no loss any more:
    Detach("detached by its rank");
  } else if (request.client_instance() != 0) {
    options_.job->NoteFarewell(request.rank(), request.client_instance());
  }
}

int64_t SessionHandler::PeerPid() const {
  return peer_.pid != 0 ? peer_.pid : peer_.hello.pid();
}

absl::Status SessionHandler::CheckAttached() const {
  if (attached_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the session is not attached; register and attach first");
}

absl::Status SessionHandler::CheckTransfer(uint64_t bytes) const {
  if (bytes <= options_.transfer_bytes_max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a transfer of ", bytes, " bytes; at most ", options_.transfer_bytes_max,
      " at a time over this wire: split it"));
}

bool SessionHandler::WorkAhead() {
  return attached_ && options_.job->WorkAhead(rank_);
}

absl::Status SessionHandler::Push(uint64_t step, uint32_t micro_step,
                                  uint32_t first_parameter,
                                  uint32_t parameter_count) {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached());
  OPTSTATE_RETURN_IF_ERROR(options_.job->Push(
      rank_, step, micro_step, first_parameter, parameter_count));
  traffic_.CountPush(first_parameter, parameter_count);
  return absl::OkStatus();
}

void SessionHandler::EndMicroStep(uint64_t request_id, uint64_t step,
                                  uint32_t micro_step) {
  options_.job->EndMicroStep(rank_, request_id, step, micro_step);
}

void SessionHandler::Commit(uint64_t request_id,
                            const session::CommitSpec& spec) {
  options_.job->Commit(rank_, request_id, spec);
}

void SessionHandler::Decide(uint64_t request_id, const StepVerdict& verdict) {
  options_.job->Decide(rank_, request_id, verdict);
}

absl::StatusOr<v1::PositionReply> SessionHandler::Position() const {
  OPTSTATE_ASSIGN_OR_RETURN(const session::JobPosition position,
                            options_.job->Position());
  v1::PositionReply reply;
  reply.set_committed_step(position.committed_step);
  reply.set_phase(position.phase);
  reply.set_loads_finished(position.loads_finished);
  reply.set_durable_step(position.durable_step);
  if (position.last_outcome.has_value()) {
    *reply.mutable_last_outcome() = ToProto(*position.last_outcome);
  }
  if (position.prepared.has_value()) {
    *reply.mutable_prepared() = ToProto(*position.prepared);
    reply.set_prepared_is_clipped(position.prepared_is_clipped);
    reply.set_prepared_awaits_norm(position.prepared_awaits_norm);
  }
  return reply;
}

absl::StatusOr<v1::StepOutcome> SessionHandler::DecideUnattached(
    const v1::DecideRequest& request) const {
  OPTSTATE_ASSIGN_OR_RETURN(
      const session::StepOutcome outcome,
      options_.job->DecideUnattached(VerdictFrom(request)));
  return ToProto(outcome);
}

absl::Status SessionHandler::Abort(uint64_t step) {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached());
  return options_.job->Abort(rank_, step);
}

absl::Status SessionHandler::BeginLoad() {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached());
  return options_.job->BeginLoad(rank_);
}

absl::Status SessionHandler::Load(uint32_t array, uint32_t parameter,
                                  uint64_t begin, uint64_t numel,
                                  uint32_t dtype,
                                  absl::Span<const std::byte> data) {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached());
  OPTSTATE_RETURN_IF_ERROR(CheckArray(array));
  const bool per_parameter = IsPerParameter(array);
  if (!per_parameter && !IsValidDType(dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "dtype ", dtype, " is not known; 1 float32, 2 bfloat16, 3 float16"));
  }
  const DType type =
      per_parameter ? DType::kFloat32 : static_cast<DType>(dtype);
  const uint64_t bytes =
      BytesOf(numel, per_parameter ? sizeof(int64_t) : SizeInBytes(type));
  OPTSTATE_RETURN_IF_ERROR(CheckTransfer(bytes));
  if (bytes > data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("load of ", bytes, " bytes, but ", data.size(), " came"));
  }
  absl::Span<const std::byte> values = data.first(bytes);
  if (per_parameter) {
    // The values are copied: the Job checks them, and the peer could change
    // them in between.
    per_parameter_.assign(values.begin(), values.end());
    values = per_parameter_;
  }
  OPTSTATE_RETURN_IF_ERROR(
      options_.job->Load(rank_, static_cast<v1::StateArray>(array), parameter,
                         begin, numel, type, values));
  traffic_.CountLoaded(bytes);
  return absl::OkStatus();
}

void SessionHandler::FinishLoad(uint64_t request_id, const LoadEnd& end) {
  options_.job->FinishLoad(rank_, request_id, end);
}

absl::StatusOr<uint64_t> SessionHandler::FetchBytes(uint32_t array,
                                                    uint32_t parameter,
                                                    uint64_t numel) const {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached());
  OPTSTATE_RETURN_IF_ERROR(CheckArray(array));
  uint64_t element_bytes =
      IsPerParameter(array) ? sizeof(int64_t) : sizeof(float);
  if (array == v1::STATE_ARRAY_PARAMETER) {
    OPTSTATE_ASSIGN_OR_RETURN(const Layout* layout, options_.job->layout());
    // The Job refuses a parameter that is not there.
    if (parameter < layout->parameters().size()) {
      element_bytes = SizeInBytes(layout->parameters()[parameter].dtype);
    }
  }
  const uint64_t bytes = BytesOf(numel, element_bytes);
  OPTSTATE_RETURN_IF_ERROR(CheckTransfer(bytes));
  return bytes;
}

absl::StatusOr<uint64_t> SessionHandler::Fetch(uint32_t array,
                                               uint32_t parameter,
                                               uint64_t begin, uint64_t numel,
                                               absl::Span<std::byte> out) {
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t bytes,
                            FetchBytes(array, parameter, numel));
  OPTSTATE_ASSIGN_OR_RETURN(
      const uint64_t step,
      options_.job->Fetch(static_cast<v1::StateArray>(array), parameter, begin,
                          numel, out.first(bytes)));
  traffic_.CountSent(bytes);
  return step;
}

absl::Status SessionHandler::HintParameters(uint32_t kind, uint32_t first,
                                            uint64_t count) {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached());
  if (kind != v1::ParameterHint::KIND_PREFETCH &&
      kind != v1::ParameterHint::KIND_RELEASE) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter hint ", kind, " is not known; 1 prefetch, 2 release"));
  }
  if (count > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a hint of ", count, " parameters"));
  }
  return options_.job->HintParameters(static_cast<session::ParameterHint>(kind),
                                      first, static_cast<uint32_t>(count));
}

absl::Status SessionHandler::ReadParameters(uint64_t offset_bytes,
                                            absl::Span<std::byte> out) {
  OPTSTATE_RETURN_IF_ERROR(CheckAttached());
  OPTSTATE_RETURN_IF_ERROR(options_.job->ReadParameters(offset_bytes, out));
  traffic_.CountSent(out.size());
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<const Hyperparams>> SessionHandler::Groups(
    const v1::CommitRequest& request) {
  groups_.resize(request.groups_size());
  clips_with_.resize(request.groups_size());
  for (int i = 0; i < request.groups_size(); ++i) {
    const auto& values = request.groups(i).values();
    if (static_cast<size_t>(values.size()) > kHyperparamsMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("group ", i, " has ", values.size(),
                       " hyperparameters; at most ", kHyperparamsMax));
    }
    groups_[i] = {};
    std::copy(values.begin(), values.end(), groups_[i].value.begin());
    groups_[i].max_norm = request.groups(i).max_norm();
    clips_with_[i] = request.groups(i).clips_with();
  }
  return groups_;
}

}  // namespace optstate::transport
