#include "server/session/job_description.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/conversions.h"
#include "proto/types/layout.h"
#include "proto/types/status_macros.h"
#include "server/session/steps/loss_scaler.h"

namespace optstate::session {
namespace {

absl::string_view Name(PartitionMode mode) {
  switch (mode) {
    case PartitionMode::kGreedy:
      return "greedy";
    case PartitionMode::kContiguous:
      return "contiguous";
    case PartitionMode::kReplicated:
      return "replicated";
    case PartitionMode::kLocal:
      return "local";
  }
  return "invalid";
}

absl::string_view Name(bool value) { return value ? "true" : "false"; }

template <typename T>
absl::Status Differs(absl::string_view what, const T& now, const T& asked) {
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks are attached with ", what, " ", now, ", this one has ", asked,
      "; it can change when all have detached"));
}

absl::StatusOr<JobDescription> FromProto(const v1::RegisterRequest& request) {
  OPTSTATE_ASSIGN_OR_RETURN(Layout layout, LayoutFromProto(request.layout()));
  OPTSTATE_ASSIGN_OR_RETURN(const PartitionMode partition,
                            PartitionModeFromProto(request.partition()));
  JobDescription description = {
      std::move(layout),    request.world_size(), request.host_id(), partition,
      request.accumulate(), request.ephemeral(),  std::nullopt,      {},
      request.storage(),    request.speculative()};
  if (request.has_loss_scaler()) {
    description.loss_scaler = request.loss_scaler();
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      description.accumulate_dtype,
      AccumulateDTypeFromProto(request.accumulate_dtype()));
  return description;
}

}  // namespace

std::string TextOf(const std::optional<v1::LossScaler>& scaler) {
  return scaler.has_value() ? absl::StrCat("{", scaler->ShortDebugString(), "}")
                            : "none";
}

absl::StatusOr<JobDescription> DescriptionOf(const RegisterSpec& spec) {
  if (spec.world_size < 1 || spec.world_size > kWorldSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("world_size is ", spec.world_size,
                     ", it must be from 1 to ", kWorldSizeMax));
  }
  if (spec.rank >= spec.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", spec.rank, " of a world of ", spec.world_size));
  }
  if (spec.local_world_size == 0) {
    return absl::InvalidArgumentError(
        "local_world_size is not set: it is how many of the ranks are on this "
        "machine");
  }
  if (spec.local_world_size != spec.world_size) {
    return absl::UnimplementedError(absl::StrCat(
        "rank ", spec.rank, ": ", spec.local_world_size, " of ",
        spec.world_size,
        " ranks are on this machine; a job whose ranks are on several machines "
        "is not supported yet"));
  }
  if (spec.loss_scaler.has_value()) {
    OPTSTATE_RETURN_IF_ERROR(CheckLossScaler(*spec.loss_scaler));
  }
  if (spec.loss_scaler_state.has_value()) {
    OPTSTATE_RETURN_IF_ERROR(CheckLossScalerState(
        spec.loss_scaler.value_or(v1::LossScaler()), *spec.loss_scaler_state));
  }
  JobDescription description = {
      spec.layout,     spec.world_size, spec.host_id,     spec.partition,
      spec.accumulate, spec.ephemeral,  spec.loss_scaler, spec.accumulate_dtype,
      spec.storage,    spec.speculative};
  return description;
}

std::string SerializeDescription(const JobDescription& description) {
  v1::RegisterRequest request;
  *request.mutable_layout() = ToProto(description.layout);
  request.set_world_size(description.world_size);
  request.set_local_world_size(description.world_size);
  request.set_host_id(description.host_id);
  request.set_partition(static_cast<v1::PartitionMode>(description.partition));
  request.set_accumulate(description.accumulate);
  request.set_ephemeral(description.ephemeral);
  if (description.loss_scaler.has_value()) {
    *request.mutable_loss_scaler() = *description.loss_scaler;
  }
  request.set_accumulate_dtype(
      static_cast<v1::AccumulateDType>(description.accumulate_dtype));
  *request.mutable_storage() = description.storage;
  request.set_speculative(description.speculative);
  return request.SerializeAsString();
}

absl::StatusOr<JobDescription> ParseDescription(const std::string& bytes) {
  v1::RegisterRequest request;
  if (!request.ParseFromString(bytes)) {
    return absl::DataLossError("job.binpb: not an optstate.v1.RegisterRequest");
  }
  // A build without this limit may have written the file.
  const auto groups = static_cast<size_t>(request.layout().groups_size());
  if (groups > kGroupsMax) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job.binpb: the layout has ", groups,
        " param groups, and this "
        "optstated takes ",
        kGroupsMax,
        ": the hyperparameters of more do not "
        "fit the message of a commit, so that no step of the job can be taken. "
        "Its files are left as they are: read them with the build that made "
        "them, or delete the job and register it anew, from a checkpoint, with "
        "parameters of equal hyperparameters in one group"));
  }
  absl::StatusOr<JobDescription> description = FromProto(request);
  if (!description.ok()) {
    return absl::DataLossError(
        absl::StrCat("job.binpb: ", description.status().message()));
  }
  if (description->world_size < 1 || description->world_size > kWorldSizeMax) {
    return absl::DataLossError(
        absl::StrCat("job.binpb: a world of ", description->world_size));
  }
  return description;
}

absl::Status CheckSameSettings(const JobDescription& now,
                               const JobDescription& asked) {
  if (now.host_id != asked.host_id) {
    return absl::UnimplementedError(absl::StrCat(
        "the attached ranks are on machine \"", now.host_id,
        "\", this one is on \"", asked.host_id,
        "\"; a job whose ranks are on several machines is not supported yet"));
  }
  if (now.world_size != asked.world_size) {
    return Differs("world_size", now.world_size, asked.world_size);
  }
  if (now.partition != asked.partition) {
    return Differs("partition", Name(now.partition), Name(asked.partition));
  }
  if (now.accumulate != asked.accumulate) {
    return Differs("accumulate", Name(now.accumulate), Name(asked.accumulate));
  }
  if (now.accumulation() != asked.accumulation()) {
    return Differs("accumulate_dtype", Name(now.accumulate_dtype),
                   Name(asked.accumulate_dtype));
  }
  if (now.ephemeral != asked.ephemeral) {
    return Differs("ephemeral", Name(now.ephemeral), Name(asked.ephemeral));
  }
  if (now.speculative != asked.speculative) {
    return Differs("speculative", Name(now.speculative),
                   Name(asked.speculative));
  }
  const std::string scaler = TextOf(now.loss_scaler);
  if (scaler != TextOf(asked.loss_scaler)) {
    return Differs("loss_scaler", scaler, TextOf(asked.loss_scaler));
  }
  if (now.layout.hash() != asked.layout.hash()) {
    return absl::FailedPreconditionError(
        "the layout can be extended, and its master format changed, when all "
        "ranks have detached");
  }
  return absl::OkStatus();
}

}  // namespace optstate::session
