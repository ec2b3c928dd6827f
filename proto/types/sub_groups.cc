#include "proto/types/sub_groups.h"

#include <algorithm>

namespace optstate {

SubGroupTable::SubGroupTable(const Layout* layout, uint64_t sub_group_elements,
                             Cut cut)
    : layout_(layout) {
  if (sub_group_elements == 0) sub_group_elements = kSubGroupElementsDefault;
  elements_ =
      (sub_group_elements + kTileElements - 1) / kTileElements * kTileElements;
  for (uint32_t group = 0; group < layout->groups().size(); ++group) {
    first_.push_back(static_cast<uint32_t>(sub_groups_.size()));
    if (cut == Cut::kTiles) {
      CutGroup(group);
    } else {
      CutGroupAtParameters(group);
    }
  }
}

uint32_t SubGroupTable::FirstParameterOf(uint32_t group) const {
  const absl::Span<const ParameterSpec> parameters = layout_->parameters();
  const auto is_before = [](const ParameterSpec& spec, uint32_t value) {
    return spec.group < value;
  };
  return static_cast<uint32_t>(
      std::lower_bound(parameters.begin(), parameters.end(), group, is_before) -
      parameters.begin());
}

bool SubGroupTable::IsInGroup(uint32_t parameter, uint32_t group) const {
  return parameter < layout_->parameters().size() &&
         layout_->parameters()[parameter].group == group;
}

void SubGroupTable::CutGroup(uint32_t group) {
  const auto ends_by = [&](uint32_t p, uint64_t flat) {
    return layout_->flat_offset(p) +
               static_cast<uint64_t>(layout_->parameters()[p].numel) <=
           flat;
  };
  const uint64_t group_end = layout_->group_end(group);
  uint32_t parameter = FirstParameterOf(group);
  for (uint64_t begin = layout_->group_begin(group); begin < group_end;
       begin += elements_) {
    SubGroup sub_group;
    sub_group.begin = begin;
    sub_group.end = std::min(begin + elements_, group_end);
    sub_group.group = group;
    while (IsInGroup(parameter, group) && ends_by(parameter, begin)) {
      ++parameter;
    }
    sub_group.first_parameter = parameter;
    uint32_t end = parameter;
    while (IsInGroup(end, group) && layout_->flat_offset(end) < sub_group.end) {
      ++end;
    }
    sub_group.end_parameter = end;
    sub_groups_.push_back(sub_group);
  }
}

void SubGroupTable::CutGroupAtParameters(uint32_t group) {
  of_parameter_.resize(layout_->parameters().size());
  uint32_t parameter = FirstParameterOf(group);
  while (IsInGroup(parameter, group)) {
    SubGroup sub_group;
    sub_group.begin = layout_->flat_offset(parameter);
    sub_group.group = group;
    sub_group.first_parameter = parameter;
    do {
      of_parameter_[parameter] = static_cast<uint32_t>(sub_groups_.size());
      ++parameter;
      sub_group.end = IsInGroup(parameter, group)
                          ? layout_->flat_offset(parameter)
                          : layout_->group_end(group);
    } while (
        IsInGroup(parameter, group) &&
        sub_group.end +
                static_cast<uint64_t>(layout_->parameters()[parameter].numel) -
                sub_group.begin <=
            elements_);
    sub_group.end_parameter = parameter;
    sub_groups_.push_back(sub_group);
  }
}

}  // namespace optstate
