#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/admin/job_access.h"
#include "client/channel/channel.h"
#include "client/channel/connect.h"
#include "client/channel/transport_error.h"
#include "client/client.h"
#include "client/session/parameter_digests.h"
#include "client/session/parameter_reader.h"
#include "proto/types/access_names.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// Returns a number other than 0, which for the engine means no instance.
uint64_t NewInstance() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

absl::Status CheckOptions(const SessionOptions& options) {
  if (options.job.empty()) {
    return absl::InvalidArgumentError("the job's name is empty");
  }
  if (options.connect_timeout <= absl::ZeroDuration() ||
      options.step_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        "connect_timeout and step_timeout must be above 0");
  }
  if (!options.access.has_value()) return absl::OkStatus();
  return CheckAccessNames(options.access->group, options.access->is_private,
                          options.access->readers);
}

NoticeSink NoticesOf(const SessionOptions& options) {
  if (options.notice != nullptr) return options.notice;
  return [job = options.job, rank = options.rank](const std::string& text) {
    std::fprintf(stderr, "optstate: job \"%s\", rank %u: %s\n", job.c_str(),
                 rank, text.c_str());
  };
}

// Returns FAILED_PRECONDITION when the session asks a daemon of its own, in
// which there are no others, for who else may use the job.
absl::Status CheckAccessOf(const SessionOptions& options, AwayDaemon away) {
  if (!options.access.has_value()) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(const Endpoint endpoint,
                            ResolveEndpoint(options.endpoint, away));
  if (endpoint.kind != Endpoint::Kind::kEmbedded) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", options.job,
      "\": group, private and readers are for a job of a daemon of the node, "
      "and this one would be in a private daemon, which has one user: start "
      "optstated, or leave them out"));
}

// Compares who may use the job with what the session asked for, once it is
// attached. One rank of a job that was there does so for all.
absl::Status ConfirmAccess(const SessionOptions& options, bool is_new) {
  if (!options.access.has_value() || (!is_new && options.rank != 0)) {
    return absl::OkStatus();
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      const AccessOptions present,
      AskJobAccess(options.endpoint, options.job, options.connect_timeout,
                   options.interrupted));
  if (is_new || present == *options.access) return absl::OkStatus();
  NoticesOf(options)(absl::StrCat(
      "the job was there before and keeps who may use it (",
      AccessText(present), "), which is not what this script asks for (",
      AccessText(*options.access), "); `optctl set job ", options.job,
      " group=... private=... readers=...` changes it"));
  return absl::OkStatus();
}

absl::StatusOr<ChannelSetup> MakeSetup(SessionOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(CheckOptions(options));
  // The layout is moved: it is by far the largest part and not needed twice.
  OPTSTATE_ASSIGN_OR_RETURN(
      Layout layout, Layout::Make(std::exchange(options.layout, LayoutSpec())));
  OPTSTATE_ASSIGN_OR_RETURN(
      RankPartition partition,
      MakeRankPartition(layout, options.partition, options.world_size,
                        options.rank));
  if (options.local_world_size == 0) {
    options.local_world_size = options.world_size;
  }
  return ChannelSetup{.job = options.job,
                      .layout = std::move(layout),
                      .partition = std::move(partition),
                      .partition_mode = options.partition,
                      .rank = options.rank,
                      .world_size = options.world_size,
                      .local_world_size = options.local_world_size,
                      .accumulate = options.accumulate,
                      .accumulate_dtype = options.accumulate_dtype,
                      .speculative = options.speculative,
                      .two_phase = options.two_phase,
                      .ephemeral = options.ephemeral,
                      .extend = options.extend,
                      .loss_scaler = options.loss_scaler,
                      .loss_scaler_state = options.loss_scaler_state,
                      .storage = options.storage,
                      .access = options.access,
                      .fetches_parameters = options.fetches_parameters,
                      .client_instance = NewInstance(),
                      .interrupted = options.interrupted,
                      .notice = NoticesOf(options)};
}

}  // namespace

Session::Session(SessionOptions options)
    : options_(std::move(options)), owner_pid_(getpid()) {}

Session::~Session() { Close(); }

absl::StatusOr<std::unique_ptr<Session>> Session::Open(SessionOptions options) {
  // A job that is not ephemeral is not begun in a daemon of this process while
  // the node's daemon is being restarted.
  const AwayDaemon away =
      options.ephemeral ? AwayDaemon::kIsNone : AwayDaemon::kCounts;
  OPTSTATE_RETURN_IF_ERROR(CheckAccessOf(options, away));
  absl::StatusOr<Endpoint> endpoint = FindDaemon(
      options.endpoint, away, options.daemon_path, options.connect_timeout);
  // The error names the endpoint; the name of the job would add nothing.
  if (!endpoint.ok()) return endpoint.status();
  options.endpoint = endpoint->ToString();
  const auto make_channel = [&](ChannelSetup setup) {
    return MakeChannel(*endpoint, std::move(setup));
  };
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Session> session,
                            OpenOver(make_channel, std::move(options)));
  OPTSTATE_RETURN_IF_ERROR(session->AnnotateWithJob(
      ConfirmAccess(session->options_, session->created_)));
  return session;
}

absl::StatusOr<std::unique_ptr<Session>> Session::OpenOver(
    ChannelFactory factory, SessionOptions options) {
  absl::StatusOr<ChannelSetup> setup = MakeSetup(options);
  if (!setup.ok()) {
    return Annotate(setup.status(), absl::StrCat("job \"", options.job, "\""));
  }
  std::unique_ptr<Session> session(new Session(std::move(options)));
  session->setup_ = std::make_unique<ChannelSetup>(*setup);
  session->digests_ = std::make_unique<ParameterDigests>(
      &session->setup_->layout, session->options_.change_detection);
  session->reader_ = std::make_unique<ParameterReader>(&session->setup_->layout,
                                                       session->digests_.get());
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Channel> channel,
                            factory(*std::move(setup)));
  OPTSTATE_RETURN_IF_ERROR(
      session->AnnotateWithJob(session->Connect(std::move(channel))));
  return session;
}

absl::Status Session::Connect(std::unique_ptr<Channel> channel) {
  channel_ = std::move(channel);
  Attached attached;
  OPTSTATE_RETURN_IF_ERROR(ConnectWithin(Attempt::kFirst, &attached));
  attached_ = true;
  created_ = attached.created;
  committed_step_ = attached.committed_step;
  loss_scaler_ = attached.loss_scaler;
  load_required_from_ = attached.load_required_from;
  speculates_ = attached.speculates;
  loads_finished_ = attached.loads_finished;
  takes_begin_at_ = attached.takes_begin_at;
  phase_ = attached.phase;
  marks_.resize(setup_->partition.pieces.size());
  return absl::OkStatus();
}

void Session::Close() {
  if (std::exchange(closed_, true) || channel_ == nullptr) return;
  if (getpid() == owner_pid_) {
    Leave();
    channel_.reset();
    return;
  }
  // In a forked child the connection belongs to the parent. The rest of the
  // channel is leaked, because gRPC's threads, which would end it, exist only
  // in the parent.
  channel_->Abandon();
  static_cast<void>(channel_.release());
}

SessionInfo Session::info() const {
  return {.committed_step = committed_step_,
          .phase = phase_,
          .loss_scaler = loss_scaler_,
          .load_required_from = load_required_from_,
          .created = created_,
          .endpoint = options_.endpoint,
          .wire = closed_ ? std::string() : std::string(channel_->wire()),
          .commit_open = commit_.has_value(),
          .connections = connections_};
}

const Layout& Session::layout() const { return setup_->layout; }

size_t Session::piece_count() const { return setup_->partition.pieces.size(); }

GradientPiece Session::piece(size_t index) const {
  const Piece& piece = setup_->partition.pieces[index];
  return {.parameter = piece.parameter,
          .begin = piece.begin,
          .numel = piece.numel,
          .dtype = setup_->layout.parameters()[piece.parameter].gradient_dtype};
}

absl::StatusOr<absl::Span<std::byte>> Session::gradient(size_t index) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckUsable()));
  const Piece& piece = setup_->partition.pieces[index];
  const uint64_t bytes = GradientBytes(piece);
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(
      channel_->AwaitGradientArea(piece.gradient_offset_bytes + bytes)));
  return channel_->gradient_area().subspan(piece.gradient_offset_bytes, bytes);
}

uint64_t Session::GradientBytes(const Piece& piece) const {
  return piece.numel *
         SizeInBytes(
             setup_->layout.parameters()[piece.parameter].gradient_dtype);
}

absl::Span<const std::byte> Session::parameter(uint32_t parameter) const {
  if (closed_ || options_.fetches_parameters ||
      parameter >= setup_->layout.parameters().size()) {
    return {};
  }
  const ParameterSpec& spec = setup_->layout.parameters()[parameter];
  return channel_->parameter_area().subspan(
      setup_->layout.parameter_offset_bytes(parameter),
      static_cast<uint64_t>(spec.numel) * SizeInBytes(spec.dtype));
}

absl::Status Session::CheckHasParameters() const {
  if (!options_.fetches_parameters) return absl::OkStatus();
  return AnnotateWithJob(absl::FailedPreconditionError(
      "this session fetches parameters one by one: it has none mapped. Fetch "
      "them (StateArray::kParameter; optstate.ParameterStore)"));
}

absl::Status Session::CheckParameterArea() const {
  return closed_ ? absl::OkStatus()
                 : AnnotateWithJob(channel_->CheckParameterArea());
}

absl::StatusOr<std::unique_ptr<ParameterViews>> Session::MapViews() {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckWhole()));
  OPTSTATE_RETURN_IF_ERROR(CheckHasParameters());
  if (speculates_) {
    return AnnotateWithJob(absl::UnimplementedError(
        "the job is speculative: the daemon writes parameters while the "
        "trainer still computes with them"));
  }
  if (channel_->parameter_file() < 0) {
    return AnnotateWithJob(absl::UnimplementedError(absl::StrCat(
        "over ", std::string(channel_->wire()), " parameters are copied")));
  }
  absl::StatusOr<std::unique_ptr<ParameterViews>> views =
      ParameterViews::Map(channel_->parameter_file(), setup_->layout);
  if (!views.ok()) return AnnotateWithJob(views.status());
  has_views_ = true;
  return views;
}

absl::StatusOr<std::unique_ptr<GradientViews>> Session::MapGradientViews() {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckUsable()));
  if (channel_->parameter_file() < 0) {
    return AnnotateWithJob(absl::UnimplementedError(absl::StrCat(
        "over ", std::string(channel_->wire()), " gradients are copied")));
  }
  // The views are written without a further look at the pages.
  const absl::Span<std::byte> area = channel_->gradient_area();
  OPTSTATE_RETURN_IF_ERROR(
      AnnotateWithJob(channel_->AwaitGradientArea(area.size())));
  absl::StatusOr<std::unique_ptr<GradientViews>> views =
      GradientViews::Map(area);
  if (!views.ok()) return AnnotateWithJob(views.status());
  return views;
}

absl::StatusOr<std::unique_ptr<DeviceParameters>> Session::MapDeviceParameters(
    absl::string_view device) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
  OPTSTATE_RETURN_IF_ERROR(CheckHasParameters());
  DeviceParameters::Shared shared;
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(Persist([&]() -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(
        shared, channel_->ShareParameters(device, StepDeadline()));
    return absl::OkStatus();
  })));
  absl::StatusOr<std::unique_ptr<DeviceParameters>> mapped =
      DeviceParameters::Map(std::move(shared), setup_->layout, connections_);
  if (!mapped.ok()) return AnnotateWithJob(mapped.status());
  return mapped;
}

absl::Status Session::FindOnDevice(
    const DeviceParameters& parameters, uint32_t parameter,
    std::vector<DeviceParameters::Range>* ranges) const {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckUsable()));
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckParameters(parameter, 1)));
  ranges->clear();
  if (!IsOfThisConnection(parameters)) return absl::OkStatus();
  return AnnotateWithJob(
      parameters.FindRanges(parameter, channel_->run_stamps(), ranges));
}

absl::Status Session::FindWholeOnDevice(const DeviceParameters& parameters,
                                        absl::Span<const uint32_t> wanted,
                                        absl::Span<uint64_t> offsets) const {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckUsable()));
  for (const uint32_t parameter : wanted) {
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckParameters(parameter, 1)));
  }
  std::fill(offsets.begin(), offsets.end(), DeviceParameters::kNowhere);
  if (!IsOfThisConnection(parameters)) return absl::OkStatus();
  return AnnotateWithJob(
      parameters.FindWhole(wanted, channel_->run_stamps(), offsets));
}

absl::StatusOr<std::unique_ptr<DeviceGradients>> Session::ShareGradients(
    absl::string_view device, int memory_file, uint64_t memory_bytes) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
  if (memory_bytes == 0) {
    return AnnotateWithJob(
        absl::InvalidArgumentError("memory of a device has no bytes"));
  }
  std::unique_ptr<DeviceGradients> gradients;
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(Persist([&]() -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(
        gradients, DeviceGradients::Make(setup_->layout, setup_->partition,
                                         memory_bytes, connections_));
    return channel_->ShareGradients(device,
                                    {.table = gradients->table_file(),
                                     .memory = memory_file,
                                     .memory_bytes = memory_bytes},
                                    StepDeadline());
  })));
  return gradients;
}

bool Session::IsShared(const DeviceGradients& gradients) const {
  return gradients.connection() == connections_ && channel_->connected();
}

absl::Status Session::GiveUpGradients() {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
  return AnnotateWithJob(Persist([&] {
    return channel_->ShareGradients("", Channel::GradientsOffer(),
                                    StepDeadline());
  }));
}

bool Session::IsOfThisConnection(const DeviceParameters& parameters) const {
  return parameters.connection() == connections_ && channel_->connected();
}

bool Session::WritesParameters() const {
  const std::atomic<uint64_t>* const stamps = channel_->run_stamps();
  if (!commit_.has_value() || stamps == nullptr) return false;
  for (uint64_t run = 0; run < setup_->layout.run_count(); ++run) {
    if (stamps[run].load(std::memory_order_acquire) == commit_->step) {
      return true;
    }
  }
  return false;
}

absl::Status Session::NoteCopies(absl::Span<const uint32_t> parameters) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckWhole()));
  if (!digests_->enabled()) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(CheckHasParameters());
  OPTSTATE_RETURN_IF_ERROR(RollBackSpeculation());
  digests_->BeginCopies(committed_step_);
  for (const uint32_t p : parameters) {
    OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckParameters(p, 1)));
    digests_->AddWhole(p, parameter(p).data());
  }
  return CheckParameterArea();
}

absl::Status Session::FindChanged(const ParameterTargets& copies,
                                  std::vector<uint32_t>* changed) const {
  changed->clear();
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckTargets(copies)));
  if (!digests_->enabled()) return absl::OkStatus();
  for (size_t i = 0; i < copies.parameters.size(); ++i) {
    const uint32_t p = copies.parameters[i];
    if (digests_->Differs(
            p, static_cast<const std::byte*>(copies.destinations[i]))) {
      changed->push_back(p);
    }
  }
  return absl::OkStatus();
}

absl::Status Session::FindWritten(ParameterViews* views,
                                  std::vector<uint32_t>* parameters) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckIdle()));
  if (channel_->parameter_file() < 0) {
    return AnnotateWithJob(
        absl::InternalError("views of a session without a file"));
  }
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(views->FindWritten(
      channel_->parameter_file(), channel_->parameter_area(), parameters)));
  return CheckParameterArea();
}

absl::Status Session::AnnotateWithJob(const absl::Status& status) const {
  if (status.ok()) return status;
  // The endpoint comes first, because it is wrong, and a job's name may be
  // random.
  if (IsUnreachable(status)) {
    return Annotate(status, absl::StrCat("no daemon at ", options_.endpoint,
                                         " for job \"", options_.job, "\""));
  }
  return Annotate(status, absl::StrCat("job \"", options_.job, "\" at ",
                                       options_.endpoint));
}

}  // namespace optstate::client
