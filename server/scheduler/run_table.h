#ifndef OPTSTATE_SERVER_SCHEDULER_RUN_TABLE_H_
#define OPTSTATE_SERVER_SCHEDULER_RUN_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/layout.h"

namespace optstate {

// Cuts the flat space into what is computed and what is scheduled.
//
// A run is the part of one parameter within one tile. It depends on the layout
// alone, never on ranks, threads or sub-groups, so sums taken run by run in
// order have the same bits whatever those are. A sub-group is a range of whole
// tiles of one param group; a thread takes one at a time.
//
// Units: elements; "begin" and "end" of a parameter count from its own start.
// Immutable.
class RunTable {
 public:
  struct SubGroup {
    uint64_t begin = 0;  // flat
    uint64_t end = 0;
    uint32_t group = 0;
    // Parameters that may have elements here.
    uint32_t first_parameter = 0;
    uint32_t end_parameter = 0;
  };

  // `subgroup_elements` is rounded up to whole tiles; 0: the default. `layout`
  // outlives this.
  RunTable(const Layout* layout, uint64_t subgroup_elements);

  const Layout& layout() const { return *layout_; }
  absl::Span<const SubGroup> subgroups() const { return subgroups_; }
  // Index of the sub-group that holds this flat element of this group.
  uint32_t SubGroupOf(uint32_t group, uint64_t flat) const {
    return first_subgroup_[group] +
           static_cast<uint32_t>((flat - layout_->group_begin(group)) /
                                 subgroup_elements_);
  }

  uint64_t run_count() const { return layout_->run_count(); }
  uint64_t first_run(uint32_t parameter) const {
    return layout_->first_run(parameter);
  }

  // Calls visit(run, begin, numel) for the runs of `parameter` that make up
  // [begin, end), in order; both are at run borders.
  template <typename Visitor>
  void ForEachRun(uint32_t parameter, uint64_t begin, uint64_t end,
                  const Visitor& visit) const {
    const uint64_t flat = layout_->flat_offset(parameter);
    uint64_t run = layout_->run_of(parameter, begin);
    while (begin < end) {
      const uint64_t tile_end =
          ((flat + begin) / kTileElements + 1) * kTileElements - flat;
      const uint64_t run_end = std::min(tile_end, end);
      visit(run, begin, run_end - begin);
      begin = run_end;
      ++run;
    }
  }

 private:
  void CutGroup(uint32_t group);

  const Layout* layout_;
  uint64_t subgroup_elements_;
  std::vector<SubGroup> subgroups_;
  std::vector<uint32_t> first_subgroup_;  // by group
};

inline constexpr uint64_t kSubgroupElementsDefault = 262144;

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SCHEDULER_RUN_TABLE_H_
