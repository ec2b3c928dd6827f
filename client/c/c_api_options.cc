#include "client/c/c_api_options.h"

#include <cmath>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/c/c_api_structs.h"
#include "client/c_api_access.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr size_t kOptionsSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_session_options, parameter_count);
constexpr size_t kParameterSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_parameter, group);
constexpr size_t kGroupSizeMin = OPTSTATE_SIZE_THROUGH(optstate_group, options);
constexpr size_t kCommitSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_commit_options, group_count);
constexpr size_t kHyperparamsSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_hyperparams, value);
constexpr size_t kAccessSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_job_access, reader_count);
constexpr size_t kScalerSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_loss_scaler, min_scale);
static_assert(kHyperparamsMax == OPTSTATE_HYPERPARAMS_MAX);

absl::Status BadValue(absl::string_view name, int64_t value) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, " ", value, " is not a known one"));
}

absl::Status BadValue(absl::string_view name, int64_t value,
                      absl::string_view known) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, " ", value, " is none of ", known));
}

absl::StatusOr<OptimizerKind> ReadOptimizer(int32_t value) {
  if (value >= 0 && FindOptimizer(static_cast<uint32_t>(value)) != nullptr) {
    return static_cast<OptimizerKind>(value);
  }
  return BadValue("optimizer", value);
}

absl::StatusOr<PartitionMode> ReadPartition(int32_t value) {
  if (value == 0 || value == OPTSTATE_GREEDY) return PartitionMode::kGreedy;
  if (value == OPTSTATE_CONTIGUOUS) return PartitionMode::kContiguous;
  if (value == OPTSTATE_REPLICATED) return PartitionMode::kReplicated;
  if (value == OPTSTATE_LOCAL) return PartitionMode::kLocal;
  return BadValue("partition", value);
}

absl::StatusOr<StateFormat> ReadStateFormat(int32_t value) {
  if (value == 0) return StateFormat::kFloat32;
  if (value > 0 && IsValidStateFormat(static_cast<uint32_t>(value))) {
    return static_cast<StateFormat>(value);
  }
  return BadValue("state format", value);
}

absl::StatusOr<MasterFormat> ReadMasterFormat(int32_t value) {
  if (value == 0) return MasterFormat::kFloat32;
  if (value > 0 && IsValidMasterFormat(static_cast<uint32_t>(value))) {
    return static_cast<MasterFormat>(value);
  }
  return BadValue("master format", value);
}

absl::StatusOr<ChangeDetection> ReadChangeDetection(int32_t value) {
  if (value >= OPTSTATE_DETECT_OFF && value <= OPTSTATE_DETECT_EXACT) {
    return static_cast<ChangeDetection>(value);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("change_detection is ", value));
}

absl::StatusOr<StorageOptions> ReadStorage(
    const optstate_session_options& from) {
  if (from.placement < 0 || from.placement > OPTSTATE_PLACEMENT_AUTO) {
    return BadValue("placement", from.placement,
                    "0 (host, or what the job has), 1 (host), 2 (nvme) and 3 "
                    "(auto)");
  }
  if (from.durability < 0 || from.durability > OPTSTATE_DURABILITY_INTERVAL) {
    return BadValue("durability", from.durability,
                    "0 (none, or what the job has), 1 (none), 2 (step), 3 "
                    "(every) and 4 (interval)");
  }
  return StorageOptions{
      .placement = static_cast<Placement>(from.placement),
      .durability = static_cast<Durability>(from.durability),
      .host_budget_bytes = from.host_budget_bytes,
      .sub_group_elements = from.sub_group_elements,
      .durability_steps = from.durability_steps,
      .durability_interval = absl::Milliseconds(from.durability_interval_ms),
      .parameters_on_disk = from.parameters_on_disk != 0,
      .parameter_cache_bytes = from.parameter_cache_bytes,
      .offload_fraction = from.has_offload_fraction != 0
                              ? std::optional(from.offload_fraction)
                              : std::nullopt,
      .device_budget_bytes = from.device_budget_bytes};
}

absl::StatusOr<AccumulateDType> ReadAccumulateDType(int32_t value) {
  if (value == 0) return AccumulateDType::kFloat32;
  if (value > 0 && IsValidAccumulateDType(static_cast<uint32_t>(value))) {
    return static_cast<AccumulateDType>(value);
  }
  return BadValue("accumulate dtype", value);
}

absl::StatusOr<std::optional<LossScaler>> ReadLossScaler(
    const optstate_loss_scaler* given) {
  if (given == nullptr) return std::nullopt;
  OPTSTATE_ASSIGN_OR_RETURN(const optstate_loss_scaler from,
                            ReadStruct(given, kScalerSizeMin, "loss_scaler"));
  return LossScaler{.dynamic = from.dynamic != 0,
                    .init_scale = from.init_scale,
                    .growth_factor = from.growth_factor,
                    .backoff_factor = from.backoff_factor,
                    .growth_interval = from.growth_interval,
                    .hysteresis = from.hysteresis,
                    .min_scale = from.min_scale};
}

absl::StatusOr<std::optional<LossScalerState>> ReadLossScalerState(
    const optstate_loss_scaler* given) {
  if (given == nullptr) return std::nullopt;
  OPTSTATE_ASSIGN_OR_RETURN(const optstate_loss_scaler from,
                            ReadStruct(given, kScalerSizeMin, "loss_scaler"));
  if (from.begin_loss_scale == 0) return std::nullopt;
  return LossScalerState{.loss_scale = from.begin_loss_scale,
                         .good_steps = from.begin_good_steps,
                         .hysteresis_left = from.begin_hysteresis_left};
}

absl::Status ReadTimeout(double seconds, absl::string_view name,
                         absl::Duration* timeout) {
  if (seconds == 0) return absl::OkStatus();
  if (!(seconds > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", seconds, "; it must be above 0"));
  }
  *timeout = absl::Seconds(seconds);
  return absl::OkStatus();
}

absl::StatusOr<ParameterSpec> ReadParameter(
    const optstate_session_options& options, size_t index) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const optstate_parameter from,
      ReadElement(options.parameters, index, kParameterSizeMin, "parameters"));
  if (from.name == nullptr) return absl::InvalidArgumentError("name is NULL");
  if (from.shape == nullptr && from.ndim != 0) {
    return absl::InvalidArgumentError("shape is NULL");
  }
  OPTSTATE_ASSIGN_OR_RETURN(const DType dtype, ReadDType(from.dtype, "dtype"));
  OPTSTATE_ASSIGN_OR_RETURN(const DType gradient_dtype,
                            ReadDType(from.gradient_dtype, "gradient_dtype"));
  if ((from.global_shape == nullptr) != (from.offset == nullptr)) {
    return absl::InvalidArgumentError(
        "of global_shape and offset one is NULL: a shard has both");
  }
  ParameterSpec parameter = {
      .name = from.name,
      .shape = std::vector<int64_t>(from.shape, from.shape + from.ndim),
      .numel = from.numel,
      .dtype = dtype,
      .gradient_dtype = gradient_dtype,
      .group = from.group};
  if (from.global_shape != nullptr) {
    parameter.name = ShardName(from.name, from.owner);
    parameter.shard = Shard{
        .owner = from.owner,
        .global_shape = {from.global_shape, from.global_shape + from.ndim},
        .offset = {from.offset, from.offset + from.ndim}};
  }
  return parameter;
}

absl::StatusOr<LayoutSpec> ReadLayout(const optstate_session_options& options) {
  LayoutSpec layout;
  OPTSTATE_ASSIGN_OR_RETURN(layout.optimizer, ReadOptimizer(options.optimizer));
  OPTSTATE_ASSIGN_OR_RETURN(layout.state_format,
                            ReadStateFormat(options.state_format));
  OPTSTATE_ASSIGN_OR_RETURN(layout.master_format,
                            ReadMasterFormat(options.master_format));
  for (size_t i = 0; i < options.group_count; ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(
        const optstate_group group,
        ReadElement(options.groups, i, kGroupSizeMin, "groups"));
    layout.groups.push_back({.options = group.options});
  }
  layout.parameters.reserve(options.parameter_count);
  for (size_t i = 0; i < options.parameter_count; ++i) {
    absl::StatusOr<ParameterSpec> parameter = ReadParameter(options, i);
    if (!parameter.ok()) {
      return Annotate(parameter.status(), absl::StrCat("parameter ", i));
    }
    layout.parameters.push_back(*std::move(parameter));
  }
  return layout;
}

std::string ReadText(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

absl::StatusOr<std::optional<AccessOptions>> ReadAccess(
    const optstate_job_access* given) {
  if (given == nullptr) return std::nullopt;
  OPTSTATE_ASSIGN_OR_RETURN(const optstate_job_access from,
                            ReadStruct(given, kAccessSizeMin, "access"));
  AccessOptions access = {.group = ReadText(from.group),
                          .is_private = from.is_private != 0};
  if (from.readers == nullptr && from.reader_count != 0) {
    return absl::InvalidArgumentError("access.readers is NULL");
  }
  for (size_t i = 0; i < from.reader_count; ++i) {
    if (from.readers[i] == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("access.readers[", i, "] is NULL"));
    }
    access.readers.emplace_back(from.readers[i]);
  }
  return std::make_optional(std::move(access));
}

}  // namespace

absl::StatusOr<StateArray> ReadStateArray(int32_t value) {
  if (value >= 0 && IsValidStateArray(static_cast<uint32_t>(value))) {
    return static_cast<StateArray>(value);
  }
  return BadValue("state array", value);
}

absl::StatusOr<DType> ReadDType(int32_t value, const char* name) {
  if (value >= 0 && IsValidDType(static_cast<uint32_t>(value))) {
    return static_cast<DType>(value);
  }
  return BadValue(name, value);
}

absl::StatusOr<SessionOptions> ReadSessionOptions(
    const optstate_session_options* given) {
  OPTSTATE_ASSIGN_OR_RETURN(const optstate_session_options from,
                            ReadStruct(given, kOptionsSizeMin, "options"));
  SessionOptions options;
  options.endpoint = ReadText(from.endpoint);
  options.job = ReadText(from.job);
  OPTSTATE_ASSIGN_OR_RETURN(options.layout, ReadLayout(from));
  OPTSTATE_ASSIGN_OR_RETURN(options.partition, ReadPartition(from.partition));
  OPTSTATE_ASSIGN_OR_RETURN(options.loss_scaler,
                            ReadLossScaler(from.loss_scaler));
  OPTSTATE_ASSIGN_OR_RETURN(options.loss_scaler_state,
                            ReadLossScalerState(from.loss_scaler));
  options.rank = from.rank;
  options.world_size = from.world_size;
  options.local_world_size = from.local_world_size;
  options.accumulate = from.accumulate != 0;
  OPTSTATE_ASSIGN_OR_RETURN(options.change_detection,
                            ReadChangeDetection(from.change_detection));
  OPTSTATE_ASSIGN_OR_RETURN(options.accumulate_dtype,
                            ReadAccumulateDType(from.accumulate_dtype));
  OPTSTATE_ASSIGN_OR_RETURN(options.storage, ReadStorage(from));
  OPTSTATE_ASSIGN_OR_RETURN(options.access, ReadAccess(from.access));
  options.speculative = from.speculative != 0;
  options.two_phase = from.two_phase != 0;
  options.fetches_parameters = from.fetches_parameters != 0;
  options.ephemeral = from.ephemeral != 0;
  options.extend = from.extend != 0;
  options.daemon_path = ReadText(from.daemon_path);
  if (from.interrupted != nullptr) {
    options.interrupted = [check = from.interrupted,
                           context = from.interrupted_context] {
      return check(context) != 0;
    };
  }
  OPTSTATE_RETURN_IF_ERROR(ReadTimeout(
      from.connect_timeout_s, "connect_timeout_s", &options.connect_timeout));
  OPTSTATE_RETURN_IF_ERROR(ReadTimeout(from.step_timeout_s, "step_timeout_s",
                                       &options.step_timeout));
  return options;
}

absl::StatusOr<CommitOptions> ReadCommitOptions(
    const optstate_commit_options* given) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const optstate_commit_options from,
      ReadStruct(given, kCommitSizeMin, "commit options"));
  CommitOptions options;
  options.step = from.step;
  options.grad_scale = from.grad_scale == 0 ? 1 : from.grad_scale;
  options.max_norm = from.max_norm;
  options.max_value = from.max_value;
  options.norm_type = from.norm_type == 0 ? 2 : from.norm_type;
  options.found_inf = from.found_inf != 0;
  options.awaits_norm = from.awaits_norm != 0;
  options.groups.reserve(from.group_count);
  options.clips_with.reserve(from.group_count);
  for (size_t i = 0; i < from.group_count; ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(
        const optstate_hyperparams group,
        ReadElement(from.groups, i, kHyperparamsSizeMin, "hyperparams"));
    Hyperparams& to = options.groups.emplace_back();
    std::copy(std::begin(group.value), std::end(group.value), to.value.begin());
    to.max_norm = group.max_norm;
    options.clips_with.push_back(group.clips_with);
  }
  return options;
}

absl::StatusOr<ParameterTargets> ReadCommitTargets(
    const optstate_commit_options* given) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const optstate_commit_options from,
      ReadStruct(given, kCommitSizeMin, "commit options"));
  if (from.read_count > 0 &&
      (from.read_parameters == nullptr || from.read_destinations == nullptr)) {
    return absl::InvalidArgumentError("an array is NULL");
  }
  ParameterTargets targets = {
      .parameters = {from.read_parameters, from.read_count},
      .destinations = {from.read_destinations, from.read_count}};
  if (from.part_ready != nullptr) {
    targets.ready = [call = from.part_ready, context = from.part_ready_context](
                        uint32_t parameter, uint64_t begin, uint64_t end) {
      const optstate_part part = {context, parameter, begin, end};
      call(&part);
    };
  }
  return targets;
}

}  // namespace optstate::client
