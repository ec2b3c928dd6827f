#include "server/observe/trace_lanes.h"

#include "absl/strings/str_cat.h"

namespace optstate::observe {

bool TraceLanes::Place(LaneFamily* family, v1::TraceSpan* span,
                       v1::TraceChunk* chunk) {
  // The lane that was free for the shortest time: the others stay free for
  // spans that have begun earlier.
  LaneFamily::Lane* best = nullptr;
  for (LaneFamily::Lane& lane : family->lanes) {
    if (lane.end_ns > span->begin_ns()) continue;
    if (best == nullptr || lane.end_ns > best->end_ns) best = &lane;
  }
  if (best == nullptr) {
    if (family->lanes.size() == kLanesMax) return false;
    v1::TraceLane* const added = chunk->add_lanes();
    added->set_group(family->group);
    added->set_name(family->name);
    if (!family->lanes.empty()) {
      added->set_name(
          absl::StrCat(family->name, " (", family->lanes.size() + 1, ")"));
    }
    best = &family->lanes.emplace_back();
    best->number = count_++;
  }
  best->end_ns = span->begin_ns() + span->duration_ns();
  span->set_lane(best->number);
  return true;
}

}  // namespace optstate::observe
