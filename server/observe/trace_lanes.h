#ifndef OPTSTATE_SERVER_OBSERVE_TRACE_LANES_H_
#define OPTSTATE_SERVER_OBSERVE_TRACE_LANES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "optstate/v1/admin.pb.h"

namespace optstate::observe {

// The lanes of one name, of which there are as many as pieces of work were
// under way at the same time: "reads of /nvme0", "reads of /nvme0 (2)", ...
struct LaneFamily {
  struct Lane {
    uint32_t number = 0;  // TraceSpan.lane
    int64_t end_ns = 0;   // of its last span
  };

  std::string group;
  std::string name;
  std::vector<Lane> lanes;
};

// Gives the spans of a trace their lanes, so that no two of a lane overlap: a
// viewer draws one upon the other otherwise.
//
// Threads: one at a time.
class TraceLanes {
 public:
  // The most lanes of one name; an engine of disks has no more requests under
  // way.
  static constexpr size_t kLanesMax = 64;

  // Returns the lanes of that name, which live as long as this object.
  LaneFamily* Find(const std::string& group, const std::string& name) {
    LaneFamily& family = families_[{group, name}];
    if (family.lanes.empty()) {
      family.group = group;
      family.name = name;
    }
    return &family;
  }
  // Sets the lane of a span whose times are set. A lane that is new is added to
  // the chunk. Returns false when too many spans overlap.
  bool Place(LaneFamily* family, v1::TraceSpan* span, v1::TraceChunk* chunk);

 private:
  std::map<std::pair<std::string, std::string>, LaneFamily> families_;
  uint32_t count_ = 0;
};

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_TRACE_LANES_H_
