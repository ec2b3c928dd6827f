#ifndef OPTSTATE_PROTO_TYPES_LAYOUT_H_
#define OPTSTATE_PROTO_TYPES_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "proto/types/shard.h"

namespace optstate {

// The number of elements of one tile: the unit of reductions and partition
// cuts. Part of the format; see the top README.
inline constexpr uint64_t kTileElements = 4096;
// Every parameter starts at a multiple of this many elements of the flat space,
// so that a vector never straddles two parameters. With StateFormat::kDynamic8
// it starts at a multiple of kQuantizedBlockElements, so that no tile cuts a
// block.
inline constexpr uint64_t kParameterAlignElements = 16;
// The alignment in bytes of every piece and parameter within a segment.
inline constexpr uint64_t kSegmentAlignBytes = 64;

struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;
  int64_t numel = 0;
  DType dtype = DType::kFloat32;
  DType gradient_dtype = DType::kFloat32;
  uint32_t group = 0;
  // Set of every parameter of a layout for PartitionMode::kLocal, of none for
  // the other modes.
  std::optional<Shard> shard = std::nullopt;
};

// The largest number of groups, whose hyperparameters fit one commit message.
inline constexpr size_t kGroupsMax = size_t{1} << 19;

struct GroupSpec {
  uint32_t options = 0;  // bits of OptimizerInfo::options
};

struct LayoutSpec {
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  StateFormat state_format = StateFormat::kFloat32;
  // The format of the masters of 16-bit parameters: kFloat32 or kSplit.
  MasterFormat master_format = MasterFormat::kFloat32;
  std::vector<GroupSpec> groups;
  std::vector<ParameterSpec> parameters;  // group never decreases
};

// The validated list of a job's parameters and their positions.
//
// The flat space is what tiles cut: parameters in order, each at a multiple of
// kParameterAlignElements, each group starting at a new tile. State arrays have
// one element per element of the flat space. The parameter area (read by ranks)
// holds parameters in order in their own dtype, each at a multiple of
// kSegmentAlignBytes.
//
// Immutable, so safe to share between threads.
class Layout {
 public:
  // Validates `spec`. INVALID_ARGUMENT, naming the parameter: a name that is
  // empty, not UTF-8 or a duplicate; numel that is not the product of shape,
  // negative dimension, group out of range or decreasing, more than kGroupsMax,
  // invalid dtype, format, option or optimizer; a float16 parameter with a
  // split master; no parameters; or a sum that overflows 2^48 elements. A
  // parameter may have 0 elements. Shards: see CheckShard; and some parameters
  // that are shards beside some that are not, or shards of one global tensor
  // that overlap or that disagree on its shape, dtypes or group.
  static absl::StatusOr<Layout> Make(LayoutSpec spec);

  OptimizerKind optimizer() const { return spec_.optimizer; }
  const OptimizerInfo& optimizer_info() const {
    return InfoOf(spec_.optimizer);
  }
  StateFormat state_format() const { return spec_.state_format; }
  // The master format that the job chose, and the one that applies to a
  // parameter.
  MasterFormat master_format() const { return spec_.master_format; }
  MasterFormat master_format(uint32_t parameter) const {
    return spec_.parameters[parameter].dtype == DType::kFloat32
               ? MasterFormat::kParameter
               : spec_.master_format;
  }
  absl::Span<const GroupSpec> groups() const { return spec_.groups; }
  absl::Span<const ParameterSpec> parameters() const {
    return spec_.parameters;
  }
  // Returns whether the parameters are shards, for PartitionMode::kLocal.
  bool has_shards() const {
    return !spec_.parameters.empty() &&
           spec_.parameters.front().shard.has_value();
  }
  // The first element of a parameter in the flat space.
  uint64_t flat_offset(uint32_t parameter) const {
    return flat_offset_[parameter];
  }
  // The first byte of a parameter in the parameter area.
  uint64_t parameter_offset_bytes(uint32_t parameter) const {
    return parameter_offset_bytes_[parameter];
  }
  // The number of elements of the flat space, a multiple of kTileElements.
  uint64_t flat_elements() const { return flat_elements_; }
  // The first flat element of a group, and the element after its last tile.
  uint64_t group_begin(uint32_t group) const { return group_begin_[group]; }
  uint64_t group_end(uint32_t group) const { return group_begin_[group + 1]; }
  uint64_t parameter_area_bytes() const { return parameter_area_bytes_; }
  // The number of runs, the parts into which tiles cut parameters. Runs are
  // numbered parameter by parameter, so an extended layout only appends.
  uint64_t run_count() const { return first_run_.back(); }
  // The first run of a parameter; for the number of parameters, the run behind
  // the last.
  uint64_t first_run(uint32_t parameter) const { return first_run_[parameter]; }
  // The run of one element of a parameter.
  uint64_t run_of(uint32_t parameter, uint64_t element) const {
    const uint64_t flat = flat_offset_[parameter];
    return first_run_[parameter] + (flat + element) / kTileElements -
           flat / kTileElements;
  }
  // The sum of numel over all parameters.
  uint64_t element_count() const { return element_count_; }
  // The SHA-256 of a canonical serialisation, which identifies the layout at
  // re-attach.
  const std::string& hash() const { return hash_; }
  // Returns whether some group, or this one, has state array `index` of the
  // optimizer.
  bool has_state_array(int index) const;
  bool has_state_array(int index, uint32_t group) const {
    return HasStateArray(optimizer_info(), index, spec_.groups[group].options);
  }

  // Returns OK when `other` equals this, or (allow_extension) continues it with
  // whole further groups; else FAILED_PRECONDITION that names the first
  // difference ("parameter 3 is \"a.weight\" float32[4,4] in the job, \"b\"
  // here").
  absl::Status CheckSame(const Layout& other, bool allow_extension) const;

 private:
  LayoutSpec spec_;
  std::vector<uint64_t> flat_offset_;
  std::vector<uint64_t> parameter_offset_bytes_;
  std::vector<uint64_t> group_begin_;
  std::vector<uint64_t> first_run_;
  uint64_t flat_elements_ = 0;
  uint64_t parameter_area_bytes_ = 0;
  uint64_t element_count_ = 0;
  std::string hash_;
};

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_LAYOUT_H_
