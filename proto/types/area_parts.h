#ifndef OPTSTATE_PROTO_TYPES_AREA_PARTS_H_
#define OPTSTATE_PROTO_TYPES_AREA_PARTS_H_

#include <cstdint>
#include <vector>

#include "proto/types/layout.h"

namespace optstate {

// The number of elements of a parameter that are read together, counted from
// the beginning of its group. It equals the number that a worker of the engine
// updates at a time, with the same borders.
inline constexpr uint64_t kPartElements = 64 * kTileElements;

// The first element behind `element` at which the parameter is cut, or its
// numel. A parameter of up to kPartElements is not cut.
uint64_t NextCut(const Layout& layout, uint32_t parameter, uint64_t element);

// Bytes [begin, end) of the parameter area, which are new when the runs
// [first_run, end_run) are new.
struct AreaPart {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t first_run = 0;
  uint64_t end_run = 0;
};

// Returns all parameters, in order: large ones cut, small ones together. A part
// has at most `bytes_max` bytes, which holds kPartElements of any dtype.
std::vector<AreaPart> AreaParts(const Layout& layout, uint64_t bytes_max);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_AREA_PARTS_H_
