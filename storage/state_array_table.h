#ifndef OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_
#define OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "storage/state_file.h"

namespace optstate::storage {

// The arrays that a job's state has, with their file names and sizes.
enum StateArrayIndex {
  // The parameters, which ranks map and read, in their dtypes; a parameter of
  // float32, or one that is the upper half of its master, is the master too.
  kParametersArray,
  kMasterArray,
  // The arrays of the optimizer, kStateArraysMax.
  kState0Array,
  kState1Array,
  kState2Array,
  // The scales of their blocks, of formats that have them (state_scales.h).
  kScale0Array,
  kScale1Array,
  kScale2Array,
  kStepCountsArray,
  kScalarsArray,  // of optimizers with a number per parameter
  kAccumulatorArray,
  // Arrays that a restarted engine needs to finish the step that it died in:
  kRunStampsArray,
  kStagedMarksArray,
  kRankMarksArray,
  kStepIntentArray,
  // Sums of micro-steps in the gradients' dtypes, in place of
  // kAccumulatorArray: files of their own, so that a job can change between the
  // two.
  kGradientAccumulatorArray,
  kStateArrayCount,
};

struct StateArrayFile {
  std::string name;   // torch's name, as operators see it
  std::string file;   // name within the state folder
  std::string dtype;  // "float32", "int64"; "mixed": see the layout
};

// Returns the file. Empty names: no group with this layout's optimizer has the
// array.
StateArrayFile FileOf(StateArrayIndex array, const Layout& layout);

// Returns whether a job with this layout has the array at all.
bool HasArray(StateArrayIndex array, const Layout& layout,
              Accumulation accumulation);

// Returns whether the array is one that a restarted engine needs to finish a
// step, not a part of the state itself.
constexpr bool IsRecoveryArray(StateArrayIndex array) {
  return array >= kRunStampsArray && array <= kStepIntentArray;
}

// Returns the bytes of the array's file, holes included; never 0.
uint64_t FileBytes(StateArrayIndex array, const Layout& layout);

// Returns the parts of the file that take memory, ascending.
std::vector<ByteRange> ReservedRanges(StateArrayIndex array,
                                      const Layout& layout);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_
