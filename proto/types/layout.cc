#include "proto/types/layout.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "proto/types/layout_hash.h"
#include "proto/types/status_macros.h"
#include "proto/types/utf8.h"

namespace optstate {
namespace {

constexpr uint64_t kElementsMax = uint64_t{1} << 48;

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Quotes a name for a message: a peer chose the name, so it may be long or
// unprintable.
std::string Quoted(absl::string_view name) {
  constexpr size_t kBytesMax = 120;
  if (name.size() <= kBytesMax) {
    return absl::StrCat("\"", absl::CEscape(name), "\"");
  }
  return absl::StrCat("\"", absl::CEscape(name.substr(0, kBytesMax)), "...\"");
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  constexpr size_t kDimensionsMax = 16;
  const auto head = shape.subspan(0, kDimensionsMax);
  return absl::StrCat("[", absl::StrJoin(head, ","),
                      shape.size() > kDimensionsMax ? ",...]" : "]");
}

// Returns the product of `shape`; kElementsMax when it is that large or larger.
absl::StatusOr<uint64_t> Numel(absl::Span<const int64_t> shape) {
  bool empty = false;
  for (int64_t dimension : shape) {
    if (dimension < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "shape ", ShapeText(shape), " has a negative dimension"));
    }
    empty = empty || dimension == 0;
  }
  // The zero comes before the product, which might overflow first: torch takes
  // [2^40, 2^40, 0].
  if (empty) return 0;
  uint64_t product = 1;
  for (int64_t dimension : shape) {
    if (__builtin_mul_overflow(product, static_cast<uint64_t>(dimension),
                               &product) ||
        product >= kElementsMax) {
      return kElementsMax;
    }
  }
  return product;
}

absl::Status CheckDType(DType dtype, absl::string_view field) {
  if (IsValidDType(static_cast<uint32_t>(dtype))) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      field, " ", static_cast<uint32_t>(dtype), " is not a known dtype"));
}

// Checks a parameter on its own.
absl::Status CheckParameter(const ParameterSpec& parameter,
                            size_t group_count) {
  if (parameter.name.empty()) {
    return absl::InvalidArgumentError("the name is empty");
  }
  if (!IsUtf8(parameter.name)) {
    return absl::InvalidArgumentError("the name is not UTF-8");
  }
  OPTSTATE_RETURN_IF_ERROR(CheckDType(parameter.dtype, "dtype"));
  OPTSTATE_RETURN_IF_ERROR(
      CheckDType(parameter.gradient_dtype, "gradient dtype"));
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t numel, Numel(parameter.shape));
  if (numel >= kElementsMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shape ", ShapeText(parameter.shape), " has 2^48 elements or more"));
  }
  if (parameter.numel < 0 || static_cast<uint64_t>(parameter.numel) != numel) {
    return absl::InvalidArgumentError(
        absl::StrCat("numel is ", parameter.numel, ", but shape ",
                     ShapeText(parameter.shape), " has ", numel, " elements"));
  }
  if (parameter.group >= group_count) {
    return absl::InvalidArgumentError(absl::StrCat("group ", parameter.group,
                                                   " is not one of the ",
                                                   group_count, " groups"));
  }
  return absl::OkStatus();
}

// Names a parameter as its trainer does: a shard by its global tensor.
std::string QuotedName(const ParameterSpec& parameter) {
  if (!parameter.shard.has_value()) return Quoted(parameter.name);
  return absl::StrCat(Quoted(GlobalName(parameter.name)),
                      ", the shard of rank ", parameter.shard->owner);
}

// Checks a shard of a global tensor beside another one of it.
absl::Status CheckSiblings(const ParameterSpec& one,
                           const ParameterSpec& other) {
  const auto differs = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it has another ", what, " than the shard of rank ", one.shard->owner));
  };
  if (one.shard->global_shape != other.shard->global_shape) {
    return differs("global shape");
  }
  if (one.dtype != other.dtype) return differs("dtype");
  if (one.gradient_dtype != other.gradient_dtype) {
    return differs("gradient dtype");
  }
  if (one.group != other.group) return differs("group");
  if (ShardsOverlap(one.shape, *one.shard, other.shape, *other.shard)) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has elements that the shard of rank ",
                     one.shard->owner, " has as well"));
  }
  return absl::OkStatus();
}

// Checks the shards, each on its own and those of each global tensor together.
absl::Status CheckShards(const LayoutSpec& spec) {
  const bool has_shards = spec.parameters.front().shard.has_value();
  const OptimizerInfo& optimizer = InfoOf(spec.optimizer);
  absl::flat_hash_map<absl::string_view, std::vector<const ParameterSpec*>>
      siblings;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const ParameterSpec& parameter = spec.parameters[i];
    absl::Status status;
    if (parameter.shard.has_value() != has_shards) {
      status = absl::InvalidArgumentError(absl::StrCat(
          "it is ", has_shards ? "no" : "a", " shard, and parameter 0 is ",
          has_shards ? "one" : "none", "; either all are or none is"));
    } else if (has_shards) {
      status = CheckShard(parameter.name, parameter.shape, *parameter.shard);
      if (status.ok() && !optimizer.is_separable &&
          parameter.shape != parameter.shard->global_shape) {
        status = absl::UnimplementedError(absl::StrCat(
            "an update of optimizer ", optimizer.name,
            " needs the whole parameter, and this one is cut into shards: take "
            "an optimizer that updates each element by itself (adamw, sgd, "
            "...), or do not shard the parameter"));
      }
      if (!status.ok()) {
        return Annotate(
            status, absl::StrCat("parameter ", i, " ", Quoted(parameter.name)));
      }
      auto& others = siblings[GlobalName(parameter.name)];
      for (const ParameterSpec* other : others) {
        status = CheckSiblings(*other, parameter);
        if (!status.ok()) break;
      }
      others.push_back(&parameter);
    }
    OPTSTATE_RETURN_IF_ERROR(Annotate(
        status, absl::StrCat("parameter ", i, " ", QuotedName(parameter))));
  }
  return absl::OkStatus();
}

absl::Status CheckSpec(const LayoutSpec& spec) {
  const OptimizerInfo* const optimizer =
      FindOptimizer(static_cast<uint32_t>(spec.optimizer));
  if (optimizer == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer ", static_cast<uint32_t>(spec.optimizer),
                     " is not a known one"));
  }
  if (!IsValidStateFormat(static_cast<uint32_t>(spec.state_format))) {
    return absl::InvalidArgumentError(
        absl::StrCat("state format ", static_cast<uint32_t>(spec.state_format),
                     " is not a known one"));
  }
  if (!IsValidMasterFormat(static_cast<uint32_t>(spec.master_format))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "master format ", static_cast<uint32_t>(spec.master_format),
        " is not a known one"));
  }
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    const uint32_t options = spec.groups[i].options;
    if (options >> optimizer->options.size() == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("group ", i, " has options ", options, "; ",
                     optimizer->name, " has ", optimizer->options.size()));
  }
  if (spec.parameters.empty()) {
    return absl::InvalidArgumentError("the layout has no parameters");
  }
  if (spec.groups.size() > kGroupsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(spec.groups.size(), " groups; at most ", kGroupsMax));
  }
  if (spec.parameters.size() >= kElementsMax / kTileElements) {
    return absl::InvalidArgumentError("too many parameters");
  }
  absl::flat_hash_map<absl::string_view, size_t> index_of;
  index_of.reserve(spec.parameters.size());
  uint32_t group = 0;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const ParameterSpec& parameter = spec.parameters[i];
    absl::Status status = CheckParameter(parameter, spec.groups.size());
    if (status.ok() && spec.master_format == MasterFormat::kSplit &&
        parameter.dtype == DType::kFloat16) {
      status = absl::InvalidArgumentError(
          "a split master has the bfloat16 parameter for its upper half, and "
          "this one is float16: take master format float32");
    }
    if (status.ok() && parameter.group < group) {
      status = absl::InvalidArgumentError(
          absl::StrCat("group ", parameter.group, " comes after group ", group,
                       "; groups must not decrease"));
    }
    if (status.ok()) {
      const auto [it, inserted] = index_of.emplace(parameter.name, i);
      if (!inserted) {
        status = absl::InvalidArgumentError(
            absl::StrCat("parameter ", it->second, " has the same name"));
      }
    }
    OPTSTATE_RETURN_IF_ERROR(Annotate(
        status, absl::StrCat("parameter ", i, " ", Quoted(parameter.name))));
    group = parameter.group;
  }
  return CheckShards(spec);
}

// Describes what a parameter is made of: "float32[4,4]", of a shard
// "float32[4,4] at [4,0] of [8,4]".
std::string TypeText(const ParameterSpec& parameter) {
  std::string text =
      absl::StrCat(Name(parameter.dtype), ShapeText(parameter.shape));
  if (parameter.shard.has_value()) {
    absl::StrAppend(&text, " at ", ShapeText(parameter.shard->offset), " of ",
                    ShapeText(parameter.shard->global_shape));
  }
  return text;
}

std::string Describe(const ParameterSpec& parameter) {
  return absl::StrCat(QuotedName(parameter), " ", TypeText(parameter));
}

absl::Status Differs(absl::string_view what, absl::string_view in_job,
                     absl::string_view here) {
  return absl::FailedPreconditionError(
      absl::StrCat(what, " is ", in_job, " in the job, ", here, " here"));
}

// Reports the first difference between two parameters of one index.
absl::Status CheckSameParameter(size_t index, const ParameterSpec& in_job,
                                const ParameterSpec& here) {
  const std::string what = absl::StrCat("parameter ", index);
  if (in_job.name != here.name) {
    return Differs(what, Describe(in_job), QuotedName(here));
  }
  if (in_job.shape != here.shape || in_job.dtype != here.dtype ||
      in_job.shard != here.shard) {
    return Differs(absl::StrCat(what, " ", QuotedName(in_job)),
                   TypeText(in_job), TypeText(here));
  }
  if (in_job.gradient_dtype != here.gradient_dtype) {
    return Differs(
        absl::StrCat("the gradient of ", what, " ", QuotedName(in_job)),
        Name(in_job.gradient_dtype), Name(here.gradient_dtype));
  }
  if (in_job.group != here.group) {
    return Differs(absl::StrCat("the group of ", what, " ", QuotedName(in_job)),
                   absl::StrCat(in_job.group), absl::StrCat(here.group));
  }
  return absl::OkStatus();
}

// Describes how parameters are cut: "shards of 2 ranks", "whole parameters".
std::string ShardingText(absl::Span<const ParameterSpec> parameters) {
  if (!parameters.front().shard.has_value()) return "whole parameters";
  uint32_t owners = 0;
  for (const ParameterSpec& parameter : parameters) {
    owners = std::max(owners, parameter.shard->owner + 1);
  }
  return absl::StrCat("shards of ", owners, owners == 1 ? " rank" : " ranks");
}

// Reports the first difference between the parameters that both layouts have.
absl::Status CheckSameParameters(absl::Span<const ParameterSpec> in_job,
                                 absl::Span<const ParameterSpec> here) {
  const std::string sharding = ShardingText(in_job);
  absl::Status status;
  if (sharding != ShardingText(here)) {
    status = Differs("the layout", sharding, ShardingText(here));
  }
  for (size_t i = 0; i < in_job.size() && status.ok(); ++i) {
    status = CheckSameParameter(i, in_job[i], here[i]);
  }
  if (status.ok() || !here.front().shard.has_value()) return status;
  // Shards do not move from rank to rank.
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(),
                   "; state goes over to a job with other shards through a "
                   "checkpoint (torch.distributed.checkpoint)"));
}

// Reports the first option in which two groups differ.
absl::Status CheckSameOptions(const OptimizerInfo& optimizer, size_t index,
                              uint32_t in_job, uint32_t here) {
  for (size_t k = 0; k < optimizer.options.size(); ++k) {
    const bool there = (in_job >> k & 1) != 0;
    if (there == ((here >> k & 1) != 0)) continue;
    return Differs(absl::StrCat(optimizer.options[k], " of group ", index),
                   there ? "on" : "off", there ? "off" : "on");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Layout> Layout::Make(LayoutSpec spec) {
  OPTSTATE_RETURN_IF_ERROR(CheckSpec(spec));
  Layout layout;
  layout.flat_offset_.reserve(spec.parameters.size());
  layout.parameter_offset_bytes_.reserve(spec.parameters.size());
  layout.group_begin_.reserve(spec.groups.size() + 1);
  layout.group_begin_.push_back(0);
  layout.first_run_.reserve(spec.parameters.size() + 1);
  layout.first_run_.push_back(0);

  const uint64_t alignment = spec.state_format == StateFormat::kDynamic8
                                 ? uint64_t{kQuantizedBlockElements}
                                 : kParameterAlignElements;
  uint64_t flat = 0;
  uint64_t bytes = 0;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const ParameterSpec& parameter = spec.parameters[i];
    while (layout.group_begin_.size() <= parameter.group) {
      flat = RoundUp(flat, kTileElements);
      layout.group_begin_.push_back(flat);
    }
    const uint64_t numel = static_cast<uint64_t>(parameter.numel);
    layout.flat_offset_.push_back(flat);
    layout.parameter_offset_bytes_.push_back(bytes);
    layout.element_count_ += numel;
    uint64_t runs = 0;
    if (numel > 0) {
      runs = (flat + numel - 1) / kTileElements - flat / kTileElements + 1;
    }
    layout.first_run_.push_back(layout.first_run_.back() + runs);
    // Each term is below 2^48 and the sum is checked as it grows, so neither
    // it nor the bytes can wrap.
    flat += RoundUp(numel, alignment);
    bytes += RoundUp(numel * SizeInBytes(parameter.dtype), kSegmentAlignBytes);
    if (flat > kElementsMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", i, " ", Quoted(parameter.name),
                       ": the layout grows beyond 2^48 elements"));
    }
  }
  flat = RoundUp(flat, kTileElements);
  layout.group_begin_.resize(spec.groups.size() + 1, flat);
  layout.flat_elements_ = flat;
  layout.parameter_area_bytes_ = bytes;
  OPTSTATE_ASSIGN_OR_RETURN(layout.hash_, LayoutHash(spec));
  layout.spec_ = std::move(spec);
  return layout;
}

bool Layout::has_state_array(int index) const {
  return std::any_of(
      spec_.groups.begin(), spec_.groups.end(), [&](const GroupSpec& group) {
        return HasStateArray(optimizer_info(), index, group.options);
      });
}

absl::Status Layout::CheckSame(const Layout& other,
                               bool allow_extension) const {
  if (hash_ == other.hash_) return absl::OkStatus();
  if (optimizer() != other.optimizer()) {
    return Differs("the optimizer", optimizer_info().name,
                   other.optimizer_info().name);
  }
  if (state_format() != other.state_format()) {
    return Differs("the state format", Name(state_format()),
                   Name(other.state_format()));
  }
  const size_t groups_shared = std::min(groups().size(), other.groups().size());
  const size_t parameters_shared =
      std::min(parameters().size(), other.parameters().size());
  OPTSTATE_RETURN_IF_ERROR(
      CheckSameParameters(parameters().subspan(0, parameters_shared),
                          other.parameters().subspan(0, parameters_shared)));
  for (uint32_t i = 0; i < parameters_shared; ++i) {
    // The chosen format makes no difference to float32 parameters.
    if (master_format(i) != other.master_format(i)) {
      return Differs("the master format", Name(master_format()),
                     Name(other.master_format()));
    }
  }
  for (size_t i = 0; i < groups_shared; ++i) {
    OPTSTATE_RETURN_IF_ERROR(CheckSameOptions(
        optimizer_info(), i, groups()[i].options, other.groups()[i].options));
  }
  if (parameters().size() > other.parameters().size() ||
      (parameters().size() < other.parameters().size() && !allow_extension)) {
    return Differs("the number of parameters",
                   absl::StrCat(parameters().size()),
                   absl::StrCat(other.parameters().size()));
  }
  if (groups().size() > other.groups().size() ||
      (groups().size() < other.groups().size() && !allow_extension)) {
    return Differs("the number of groups", absl::StrCat(groups().size()),
                   absl::StrCat(other.groups().size()));
  }
  // `other` is an extension. Groups never decrease, so the first new parameter
  // tells.
  if (parameters().size() < other.parameters().size()) {
    const ParameterSpec& next = other.parameters()[parameters().size()];
    if (next.group < groups().size()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter ", parameters().size(), " ", Quoted(next.name),
          " is new and in group ", next.group,
          ", which the job has already; only whole groups can be added"));
    }
  }
  return absl::OkStatus();
}

}  // namespace optstate
