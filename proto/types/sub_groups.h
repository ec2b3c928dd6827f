#ifndef OPTSTATE_PROTO_TYPES_SUB_GROUPS_H_
#define OPTSTATE_PROTO_TYPES_SUB_GROUPS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/layout.h"

namespace optstate {

inline constexpr uint64_t kSubGroupElementsDefault = 262144;

// A range of one param group: the unit of placement, swapping and scheduling.
struct SubGroup {
  uint64_t begin = 0;  // flat element
  uint64_t end = 0;
  uint32_t group = 0;
  // The parameters that may have elements in this range.
  uint32_t first_parameter = 0;
  uint32_t end_parameter = 0;

  uint64_t elements() const { return end - begin; }
};

// Cuts the flat space of a layout into sub-groups. Immutable.
class SubGroupTable {
 public:
  enum class Cut : uint8_t {
    kTiles,       // whole tiles: a given number of elements each
    kParameters,  // whole parameters: one, or several of so many elements in
                  // all
  };
  // The cut that an update of the layout's optimizer needs.
  static Cut CutOf(const Layout& layout) {
    return layout.optimizer_info().is_separable ? Cut::kTiles
                                                : Cut::kParameters;
  }

  // `sub_group_elements` is rounded up to whole tiles; 0: the default. `layout`
  // outlives this.
  SubGroupTable(const Layout* layout, uint64_t sub_group_elements, Cut cut);

  absl::Span<const SubGroup> all() const { return sub_groups_; }
  size_t size() const { return sub_groups_.size(); }
  const SubGroup& operator[](size_t index) const { return sub_groups_[index]; }
  // Returns the index of the sub-group that holds this element of a parameter.
  uint32_t IndexOf(uint32_t parameter, uint64_t element) const {
    if (!of_parameter_.empty()) return of_parameter_[parameter];
    const uint32_t group = layout_->parameters()[parameter].group;
    const uint64_t distance =
        layout_->flat_offset(parameter) + element - layout_->group_begin(group);
    return first_[group] + static_cast<uint32_t>(distance / elements_);
  }

 private:
  void CutGroup(uint32_t group);
  void CutGroupAtParameters(uint32_t group);
  uint32_t FirstParameterOf(uint32_t group) const;
  bool IsInGroup(uint32_t parameter, uint32_t group) const;

  const Layout* layout_;
  uint64_t elements_;
  std::vector<SubGroup> sub_groups_;
  std::vector<uint32_t> first_;  // by group
  // The sub-groups by parameter, for Cut::kParameters.
  std::vector<uint32_t> of_parameter_;
};

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_SUB_GROUPS_H_
