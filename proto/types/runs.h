#ifndef OPTSTATE_PROTO_TYPES_RUNS_H_
#define OPTSTATE_PROTO_TYPES_RUNS_H_

#include <algorithm>
#include <cstdint>

#include "proto/types/layout.h"

namespace optstate {

// Calls visit(run, begin, numel) for the runs that make up elements [begin,
// end) of a parameter, in order; both are at borders of runs.
//
// A run is the part of one parameter within one tile. Runs depend on the layout
// alone, never on ranks, threads or sub-groups, so sums taken run by run in
// order have the same bits for any ranks, threads and sub-groups.
template <typename Visitor>
void ForEachRun(const Layout& layout, uint32_t parameter, uint64_t begin,
                uint64_t end, const Visitor& visit) {
  const uint64_t flat = layout.flat_offset(parameter);
  uint64_t run = layout.run_of(parameter, begin);
  while (begin < end) {
    const uint64_t tile_end =
        ((flat + begin) / kTileElements + 1) * kTileElements - flat;
    const uint64_t run_end = std::min(tile_end, end);
    visit(run, begin, run_end - begin);
    begin = run_end;
    ++run;
  }
}

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_RUNS_H_
