#ifndef OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_
#define OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "storage/state_file.h"

namespace optstate {

// Which arrays a job's state has, in files of which name and size.
enum StateArrayIndex {
  // What ranks map and read, in the dtypes of the parameters; where it is
  // float32
  // or the upper half of the master, the master too.
  kParametersArray,
  kMasterArray,
  // Those of the optimizer, kStateArraysMax.
  kState0Array,
  kState1Array,
  kState2Array,
  // StateFormat::kDynamic8: the scales of their blocks.
  kScale0Array,
  kScale1Array,
  kScale2Array,
  kStepCountsArray,
  kScalarsArray,  // of optimizers with a number per parameter
  kAccumulatorArray,
  // What a restarted engine needs to finish the step that it died in:
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
  std::string name;   // torch's, as operators see it
  std::string file;   // name within the state folder
  std::string dtype;  // "float32", "int64"; "mixed": see the layout
};

// Empty names: of no group with this layout's optimizer.
StateArrayFile FileOf(StateArrayIndex array, const Layout& layout);

// Whether a job with this layout has the array at all.
bool HasArray(StateArrayIndex array, const Layout& layout,
              Accumulation accumulation);

// Bytes of the array's file, holes included; never 0.
uint64_t FileBytes(StateArrayIndex array, const Layout& layout);

// The parts of it that take memory, ascending.
std::vector<ByteRange> ReservedRanges(StateArrayIndex array,
                                      const Layout& layout);

}  // namespace optstate

#endif  // OPTSTATE_STORAGE_STATE_ARRAY_TABLE_H_
