#include "storage/state_array_table.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/array_format.h"
#include "proto/types/partition.h"
#include "storage/format/rank_mark.h"
#include "storage/format/step_intent.h"
#include "storage/state_scales.h"

namespace optstate::storage {
namespace {

struct FixedFile {
  absl::string_view name;
  absl::string_view file;
  absl::string_view dtype;
};

FixedFile FixedFileOf(StateArrayIndex array, MasterFormat master) {
  switch (array) {
    case kParametersArray:
      return {"parameters", "parameters", "mixed"};
    case kMasterArray:
      return master == MasterFormat::kSplit
                 ? FixedFile{"master", "master.low16", "low 16 bits"}
                 : FixedFile{"master", "master.f32", "float32"};
    case kStepCountsArray:
      return {"step", "step_counts.i64", "int64"};
    case kScalarsArray:
      return {"scalars", "scalars.f64", "float64"};
    case kAccumulatorArray:
      return {"accumulator", "accumulator.f32", "float32"};
    case kGradientAccumulatorArray:
      return {"accumulator", "accumulator.gradient", "gradient"};
    case kRunStampsArray:
      return {"run_stamps", "run_stamps.u64", "uint64"};
    case kStagedMarksArray:
      return {"staged_marks", "staged_marks.u64", "uint64"};
    case kRankMarksArray:
      return {"rank_marks", "rank_marks", "record"};
    default:
      return {"step_intent", "step_intent", "record"};
  }
}

bool IsState(StateArrayIndex array) {
  return array >= kState0Array && array <= kState2Array;
}

bool IsScale(StateArrayIndex array) {
  return array >= kScale0Array && array <= kScale2Array;
}

// Returns which of the optimizer's arrays this one is or scales.
int StateIndex(StateArrayIndex array) {
  return IsScale(array) ? array - kScale0Array : array - kState0Array;
}

// The ends of the names of files of state arrays, by format.
struct FormatSuffix {
  StateFormat format;
  absl::string_view suffix;
};
constexpr FormatSuffix kSuffixes[] = {{StateFormat::kFloat32, ".f32"},
                                      {StateFormat::kBFloat16, ".bf16"},
                                      {StateFormat::kDynamic8, ".dynamic8"}};
// Each format has one.
static_assert(IsValidStateFormat(std::size(kSuffixes)) &&
              !IsValidStateFormat(std::size(kSuffixes) + 1));

absl::string_view Suffix(StateFormat format) {
  for (const FormatSuffix& each : kSuffixes) {
    if (each.format == format) return each.suffix;
  }
  return "";
}

// Returns the bytes of this many elements of the flat space; of scales, those
// of their blocks, the last of which may have fewer elements.
uint64_t BytesOf(StateArrayIndex array, const Layout& layout,
                 uint64_t elements) {
  if (IsState(array)) {
    return elements * SizeInBytes(ArrayFormat(layout, StateIndex(array)));
  }
  if (array == kMasterArray) {
    return elements * SizeInBytes(layout.master_format());
  }
  if (IsScale(array)) {
    return (elements + kQuantizedBlockElements - 1) / kQuantizedBlockElements *
           sizeof(float);
  }
  return elements * sizeof(float);
}

// A mapping cannot be empty.
constexpr uint64_t kFileBytesMin = 4096;

uint64_t ContentBytes(StateArrayIndex array, const Layout& layout) {
  switch (array) {
    case kParametersArray:
      // The area is whole pages, as they are mapped.
      return (layout.parameter_area_bytes() + kFileBytesMin - 1) /
             kFileBytesMin * kFileBytesMin;
    case kStepCountsArray:
    case kScalarsArray:
      return layout.parameters().size() * sizeof(int64_t);
    case kRunStampsArray:
    case kStagedMarksArray:
      return layout.run_count() * sizeof(uint64_t);
    case kRankMarksArray:
      return kWorldSizeMax * sizeof(RankMark);
    case kGradientAccumulatorArray:
      return GradientSumOffsets(layout).back();
    case kStepIntentArray:
      return StepIntentBytes(layout.groups().size(),
                             layout.parameters().size());
    default:
      return BytesOf(array, layout, layout.flat_elements());
  }
}

// Returns the ranges of the parameters that are not their own masters. The gap
// between two of them is reserved too when it is less than a tile.
std::vector<ByteRange> MasterRanges(const Layout& layout) {
  std::vector<ByteRange> ranges;
  const uint64_t bytes = SizeInBytes(layout.master_format());
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const auto numel = static_cast<uint64_t>(layout.parameters()[p].numel);
    if (layout.master_format(p) == MasterFormat::kParameter || numel == 0) {
      continue;
    }
    const uint64_t begin = layout.flat_offset(p) * bytes;
    const uint64_t end = begin + numel * bytes;
    if (!ranges.empty() && begin - ranges.back().end < kTileElements * bytes) {
      ranges.back().end = end;
    } else {
      ranges.push_back({begin, end});
    }
  }
  return ranges;
}

}  // namespace

StateArrayFile FileOf(StateArrayIndex array, const Layout& layout) {
  if (!IsState(array) && !IsScale(array)) {
    const FixedFile fixed = FixedFileOf(array, layout.master_format());
    return {std::string(fixed.name), std::string(fixed.file),
            std::string(fixed.dtype)};
  }
  const auto index = static_cast<size_t>(StateIndex(array));
  const auto known = layout.optimizer_info().state_arrays;
  if (index >= known.size()) return {};
  const absl::string_view name = known[index].name;
  if (IsScale(array)) {
    return {absl::StrCat(name, ".scale"), absl::StrCat(name, ".scale.f32"),
            "float32"};
  }
  const StateFormat format = ArrayFormat(layout, StateIndex(array));
  return {std::string(name), absl::StrCat(name, Suffix(format)),
          std::string(Name(format))};
}

bool HasArray(StateArrayIndex array, const Layout& layout,
              Accumulation accumulation) {
  switch (array) {
    case kMasterArray:
      return !MasterRanges(layout).empty();
    case kState0Array:
    case kState1Array:
    case kState2Array:
      return layout.has_state_array(StateIndex(array));
    case kScale0Array:
    case kScale1Array:
    case kScale2Array:
      return layout.has_state_array(StateIndex(array)) &&
             HasScales(ArrayFormat(layout, StateIndex(array)));
    case kScalarsArray:
      return !layout.optimizer_info().scalar.empty();
    case kAccumulatorArray:
      return accumulation == AccumulateDType::kFloat32;
    case kGradientAccumulatorArray:
      return accumulation == AccumulateDType::kGradient;
    case kStagedMarksArray:
      return accumulation.has_value();
    default:
      return true;
  }
}

uint64_t FileBytes(StateArrayIndex array, const Layout& layout) {
  return std::max(ContentBytes(array, layout), kFileBytesMin);
}

// Returns the first elements of each parameter's place, of an array with fewer
// elements than the parameter.
std::vector<ByteRange> PrefixRanges(StateArrayIndex array,
                                    const Layout& layout) {
  std::vector<ByteRange> ranges;
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const uint64_t elements =
        StateElements(layout.optimizer_info(), StateIndex(array),
                      layout.parameters()[p].shape);
    if (elements == 0) continue;
    const uint64_t begin = BytesOf(array, layout, layout.flat_offset(p));
    ranges.push_back({begin, begin + BytesOf(array, layout, elements)});
  }
  return ranges;
}

// Returns, for an array that an option brings, only the tiles of groups that
// have it.
std::vector<ByteRange> ReservedRanges(StateArrayIndex array,
                                      const Layout& layout) {
  if (array == kMasterArray) return MasterRanges(layout);
  if (!IsState(array) && !IsScale(array)) {
    return {{0, FileBytes(array, layout)}};
  }
  const int index = StateIndex(array);
  const auto& info =
      layout.optimizer_info().state_arrays[static_cast<size_t>(index)];
  if (info.extent != StateExtent::kElements) {
    return PrefixRanges(array, layout);
  }
  if (info.option == 0) return {{0, FileBytes(array, layout)}};
  std::vector<ByteRange> ranges;
  for (uint32_t group = 0; group < layout.groups().size(); ++group) {
    if (!layout.has_state_array(index, group)) continue;
    ranges.push_back({BytesOf(array, layout, layout.group_begin(group)),
                      BytesOf(array, layout, layout.group_end(group))});
  }
  return ranges;
}

}  // namespace optstate::storage
