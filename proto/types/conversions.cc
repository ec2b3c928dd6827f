#include "proto/types/conversions.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

static_assert(static_cast<int>(DType::kFloat32) == v1::DTYPE_FLOAT32);
static_assert(static_cast<int>(DType::kBFloat16) == v1::DTYPE_BFLOAT16);
static_assert(static_cast<int>(DType::kFloat16) == v1::DTYPE_FLOAT16);
static_assert(static_cast<int>(OptimizerKind::kAdam) ==
              v1::OPTIMIZER_KIND_ADAM);
static_assert(static_cast<int>(OptimizerKind::kMuon) ==
              v1::OPTIMIZER_KIND_MUON);
static_assert(static_cast<int>(StateFormat::kDynamic8) ==
              v1::STATE_FORMAT_DYNAMIC8);
static_assert(static_cast<int>(PartitionMode::kGreedy) ==
              v1::PARTITION_MODE_GREEDY);
static_assert(static_cast<int>(PartitionMode::kContiguous) ==
              v1::PARTITION_MODE_CONTIGUOUS);
static_assert(static_cast<int>(PartitionMode::kReplicated) ==
              v1::PARTITION_MODE_REPLICATED);
static_assert(static_cast<int>(PartitionMode::kLocal) ==
              v1::PARTITION_MODE_LOCAL);

// proto3 enums are open: a newer peer's value arrives as its number.
absl::Status UnknownEnum(absl::string_view type, int value) {
  return absl::InvalidArgumentError(
      value == 0 ? absl::StrCat(type, " is not set")
                 : absl::StrCat(type, " ", value, " is not known here"));
}

absl::StatusOr<OptimizerKind> OptimizerKindFromProto(v1::OptimizerKind proto) {
  if (FindOptimizer(static_cast<uint32_t>(proto)) == nullptr) {
    return UnknownEnum("optimizer", proto);
  }
  return static_cast<OptimizerKind>(proto);
}

absl::StatusOr<ParameterSpec> ParameterFromProto(const v1::Parameter& proto) {
  const auto dtype = DTypeFromProto(proto.dtype());
  if (!dtype.ok()) return dtype.status();
  const auto gradient_dtype = DTypeFromProto(proto.gradient_dtype());
  if (!gradient_dtype.ok())
    return Annotate(gradient_dtype.status(), "gradient");
  ParameterSpec parameter = {
      .name = proto.name(),
      .shape = {proto.shape().begin(), proto.shape().end()},
      .numel = proto.numel(),
      .dtype = *dtype,
      .gradient_dtype = *gradient_dtype,
      .group = proto.group(),
  };
  if (proto.has_shard()) {
    const v1::Shard& shard = proto.shard();
    parameter.shard = Shard{
        .owner = shard.owner(),
        .global_shape = {shard.global_shape().begin(),
                         shard.global_shape().end()},
        .offset = {shard.offset().begin(), shard.offset().end()},
    };
  }
  return parameter;
}

// Returns whether a proto3 string may hold the text unchanged: a parser refuses
// invalid UTF-8, and with it the whole message.
bool IsAscii(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x80;
  });
}

}  // namespace

absl::StatusOr<DType> DTypeFromProto(v1::DType proto) {
  // A negative value becomes a large one, which is not valid either.
  if (!IsValidDType(static_cast<uint32_t>(proto))) {
    return UnknownEnum("dtype", proto);
  }
  return static_cast<DType>(proto);
}

absl::StatusOr<PartitionMode> PartitionModeFromProto(v1::PartitionMode proto) {
  switch (proto) {
    case v1::PARTITION_MODE_GREEDY:
    case v1::PARTITION_MODE_CONTIGUOUS:
    case v1::PARTITION_MODE_REPLICATED:
    case v1::PARTITION_MODE_LOCAL:
      return static_cast<PartitionMode>(proto);
    default:
      return UnknownEnum("partition mode", proto);
  }
}

absl::StatusOr<AccumulateDType> AccumulateDTypeFromProto(
    v1::AccumulateDType proto) {
  switch (proto) {
    case v1::ACCUMULATE_DTYPE_UNSPECIFIED:
      return AccumulateDType::kFloat32;
    case v1::ACCUMULATE_DTYPE_FLOAT32:
    case v1::ACCUMULATE_DTYPE_GRADIENT:
      return static_cast<AccumulateDType>(proto);
    default:
      return UnknownEnum("accumulate dtype", proto);
  }
}

absl::StatusOr<Layout> LayoutFromProto(const v1::Layout& proto) {
  LayoutSpec spec;
  OPTSTATE_ASSIGN_OR_RETURN(spec.optimizer,
                            OptimizerKindFromProto(proto.optimizer()));
  // A peer from before the choice existed sends nothing.
  if (proto.state_format() != v1::STATE_FORMAT_UNSPECIFIED) {
    spec.state_format = static_cast<StateFormat>(proto.state_format());
    if (!IsValidStateFormat(static_cast<uint32_t>(proto.state_format()))) {
      return UnknownEnum("state format", proto.state_format());
    }
  }
  if (proto.master_format() != v1::MASTER_FORMAT_UNSPECIFIED) {
    spec.master_format = static_cast<MasterFormat>(proto.master_format());
    if (!IsValidMasterFormat(static_cast<uint32_t>(proto.master_format()))) {
      return UnknownEnum("master format", proto.master_format());
    }
  }
  spec.groups.reserve(proto.groups_size());
  for (const v1::ParamGroup& group : proto.groups()) {
    spec.groups.push_back({.options = group.options()});
  }
  spec.parameters.reserve(proto.parameters_size());
  for (int i = 0; i < proto.parameters_size(); ++i) {
    auto parameter = ParameterFromProto(proto.parameters(i));
    if (!parameter.ok()) {
      return Annotate(parameter.status(), absl::StrCat("parameters[", i, "]"));
    }
    spec.parameters.push_back(*std::move(parameter));
  }
  return Layout::Make(std::move(spec));
}

v1::Parameter ToProto(const ParameterSpec& parameter) {
  v1::Parameter proto;
  proto.set_name(parameter.name);
  proto.mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
  proto.set_numel(parameter.numel);
  proto.set_dtype(static_cast<v1::DType>(parameter.dtype));
  proto.set_gradient_dtype(static_cast<v1::DType>(parameter.gradient_dtype));
  proto.set_group(parameter.group);
  if (parameter.shard.has_value()) {
    const Shard& shard = *parameter.shard;
    v1::Shard& out = *proto.mutable_shard();
    out.set_owner(shard.owner);
    out.mutable_global_shape()->Add(shard.global_shape.begin(),
                                    shard.global_shape.end());
    out.mutable_offset()->Add(shard.offset.begin(), shard.offset.end());
  }
  return proto;
}

v1::Layout ToProto(const Layout& layout) {
  v1::Layout proto;
  proto.set_optimizer(static_cast<v1::OptimizerKind>(layout.optimizer()));
  proto.set_state_format(static_cast<v1::StateFormat>(layout.state_format()));
  proto.set_master_format(
      static_cast<v1::MasterFormat>(layout.master_format()));
  for (const GroupSpec& group : layout.groups()) {
    proto.add_groups()->set_options(group.options);
  }
  proto.mutable_parameters()->Reserve(
      static_cast<int>(layout.parameters().size()));
  for (const ParameterSpec& parameter : layout.parameters()) {
    *proto.add_parameters() = ToProto(parameter);
  }
  return proto;
}

v1::StepOutcome ToProto(const StepOutcome& outcome) {
  v1::StepOutcome proto;
  proto.set_step(outcome.step);
  proto.set_applied(outcome.applied);
  proto.set_found_inf(outcome.found_inf);
  proto.set_gradient_norm(outcome.gradient_norm);
  proto.set_clip_coefficient(outcome.clip_coefficient);
  proto.set_update_ns(outcome.update_ns);
  proto.set_loss_scale(outcome.loss_scale);
  proto.set_good_steps(outcome.good_steps);
  proto.set_hysteresis_left(outcome.hysteresis_left);
  proto.set_durable_step(outcome.durable_step);
  proto.set_prepared(outcome.prepared);
  proto.set_digest(outcome.digest);
  return proto;
}

StepOutcome FromProto(const v1::StepOutcome& proto) {
  return {.step = proto.step(),
          .applied = proto.applied(),
          .found_inf = proto.found_inf(),
          .gradient_norm = proto.gradient_norm(),
          .clip_coefficient = proto.clip_coefficient(),
          .update_ns = proto.update_ns(),
          .loss_scale = proto.loss_scale(),
          .good_steps = proto.good_steps(),
          .hysteresis_left = proto.hysteresis_left(),
          .durable_step = proto.durable_step(),
          .prepared = proto.prepared(),
          .digest = proto.digest()};
}

v1::OpStatus ToProto(const absl::Status& status) {
  v1::OpStatus proto;
  proto.set_code(static_cast<int32_t>(status.code()));
  const absl::string_view message = status.message();
  proto.set_message(IsAscii(message) ? std::string(message)
                                     : absl::CEscape(message));
  return proto;
}

absl::Status FromProto(const v1::OpStatus& status) {
  const bool known =
      status.code() >= 0 &&
      status.code() <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  return absl::Status(known ? static_cast<absl::StatusCode>(status.code())
                            : absl::StatusCode::kUnknown,
                      status.message());
}

}  // namespace optstate
