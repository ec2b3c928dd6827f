#include "storage/state_array_table.h"

#include <algorithm>

#include "proto/types/partition.h"
#include "storage/format/rank_mark.h"
#include "storage/format/step_intent.h"

namespace optstate {
namespace {

constexpr StateArrayFile kFiles[kStateArrayCount] = {
    {"master", "master.f32", "float32"},
    {"exp_avg", "exp_avg.f32", "float32"},
    {"exp_avg_sq", "exp_avg_sq.f32", "float32"},
    {"max_exp_avg_sq", "max_exp_avg_sq.f32", "float32"},
    {"step", "step_counts.i64", "int64"},
    {"accumulator", "accumulator.f32", "float32"},
    {"run_stamps", "run_stamps.u64", "uint64"},
    {"staged_marks", "staged_marks.u64", "uint64"},
    {"rank_marks", "rank_marks", "record"},
    {"step_intent", "step_intent", "record"},
};

// A mapping cannot be empty.
constexpr uint64_t kFileBytesMin = 4096;

uint64_t ContentBytes(StateArrayIndex array, const Layout& layout) {
  switch (array) {
    case kStepCountsArray:
      return layout.parameters().size() * sizeof(int64_t);
    case kRunStampsArray:
    case kStagedMarksArray:
      return layout.run_count() * sizeof(uint64_t);
    case kRankMarksArray:
      return kWorldSizeMax * sizeof(RankMark);
    case kStepIntentArray:
      return StepIntentBytes(layout.groups().size(),
                             layout.parameters().size());
    default:
      return layout.flat_elements() * sizeof(float);
  }
}

}  // namespace

const StateArrayFile& FileOf(StateArrayIndex array) { return kFiles[array]; }

bool HasArray(StateArrayIndex array, const Layout& layout, bool accumulate) {
  switch (array) {
    case kMaxExpAvgSqArray:
      return layout.any_amsgrad();
    case kAccumulatorArray:
    case kStagedMarksArray:
      return accumulate;
    default:
      return true;
  }
}

uint64_t FileBytes(StateArrayIndex array, const Layout& layout) {
  return std::max(ContentBytes(array, layout), kFileBytesMin);
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
