#include "storage/state_array_table.h"

#include <algorithm>

namespace optstate {
namespace {

constexpr StateArrayFile kFiles[kStateArrayCount] = {
    {"master", "master.f32", "float32"},
    {"exp_avg", "exp_avg.f32", "float32"},
    {"exp_avg_sq", "exp_avg_sq.f32", "float32"},
    {"max_exp_avg_sq", "max_exp_avg_sq.f32", "float32"},
    {"step", "step_counts.i64", "int64"},
    {"accumulator", "accumulator.f32", "float32"},
};

// A mapping cannot be empty.
constexpr uint64_t kFileBytesMin = 4096;

}  // namespace

const StateArrayFile& FileOf(StateArrayIndex array) { return kFiles[array]; }

bool HasArray(StateArrayIndex array, const Layout& layout, bool accumulate) {
  switch (array) {
    case kMaxExpAvgSqArray:
      return layout.any_amsgrad();
    case kAccumulatorArray:
      return accumulate;
    default:
      return true;
  }
}

uint64_t FileBytes(StateArrayIndex array, const Layout& layout) {
  const uint64_t bytes = array == kStepCountsArray
                             ? layout.parameters().size() * sizeof(int64_t)
                             : layout.flat_elements() * sizeof(float);
  return std::max(bytes, kFileBytesMin);
}

std::vector<ByteRange> ReservedRanges(StateArrayIndex array,
                                      const Layout& layout) {
  if (array != kMaxExpAvgSqArray) return {{0, FileBytes(array, layout)}};
  std::vector<ByteRange> ranges;
  for (uint32_t group = 0; group < layout.groups().size(); ++group) {
    if (!layout.groups()[group].amsgrad) continue;
    ranges.push_back({layout.group_begin(group) * sizeof(float),
                      layout.group_end(group) * sizeof(float)});
  }
  return ranges;
}

}  // namespace optstate
