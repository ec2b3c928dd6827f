#ifndef OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_
#define OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/types/layout.h"
#include "storage/state_file.h"

namespace optstate {

// Which arrays a job's state has, in files of which name and size. The one
// place to extend when an optimizer brings another array.
enum StateArrayIndex {
  kMasterArray,
  kExpAvgArray,
  kExpAvgSqArray,
  kMaxExpAvgSqArray,
  kStepCountsArray,
  kAccumulatorArray,
  // What a restarted engine needs to finish the step that it died in:
  kRunStampsArray,
  kStagedMarksArray,
  kRankMarksArray,
  kStepIntentArray,
  kStateArrayCount,
};

struct StateArrayFile {
  absl::string_view name;   // torch's, as operators see it
  absl::string_view file;   // name within the state folder
  absl::string_view dtype;  // "float32", "int64"
};

const StateArrayFile& FileOf(StateArrayIndex array);

// Whether a job with this layout has the array at all.
bool HasArray(StateArrayIndex array, const Layout& layout, bool accumulate);

// Bytes of the array's file, holes included; never 0.
uint64_t FileBytes(StateArrayIndex array, const Layout& layout);

// The parts of it that take memory, ascending.
std::vector<ByteRange> ReservedRanges(StateArrayIndex array,
                                      const Layout& layout);

}  // namespace optstate

#endif  // OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_
