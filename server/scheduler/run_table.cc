#include "server/scheduler/run_table.h"

namespace optstate {

RunTable::RunTable(const Layout* layout, uint64_t subgroup_elements)
    : layout_(layout) {
  if (subgroup_elements == 0) subgroup_elements = kSubgroupElementsDefault;
  subgroup_elements_ =
      (subgroup_elements + kTileElements - 1) / kTileElements * kTileElements;
  for (uint32_t group = 0; group < layout->groups().size(); ++group) {
    CutGroup(group);
  }
}

void RunTable::CutGroup(uint32_t group) {
  first_subgroup_.push_back(static_cast<uint32_t>(subgroups_.size()));
  const auto& parameters = layout_->parameters();
  const auto group_of = [](const ParameterSpec& spec, uint32_t value) {
    return spec.group < value;
  };
  uint32_t parameter = static_cast<uint32_t>(
      std::lower_bound(parameters.begin(), parameters.end(), group, group_of) -
      parameters.begin());
  const uint64_t group_end = layout_->group_end(group);
  for (uint64_t begin = layout_->group_begin(group); begin < group_end;
       begin += subgroup_elements_) {
    SubGroup subgroup;
    subgroup.begin = begin;
    subgroup.end = std::min(begin + subgroup_elements_, group_end);
    subgroup.group = group;
    const auto in_group = [&](uint32_t p) {
      return p < parameters.size() && parameters[p].group == group;
    };
    while (in_group(parameter) &&
           layout_->flat_offset(parameter) +
                   static_cast<uint64_t>(parameters[parameter].numel) <=
               begin) {
      ++parameter;
    }
    subgroup.first_parameter = parameter;
    uint32_t end = parameter;
    while (in_group(end) && layout_->flat_offset(end) < subgroup.end) ++end;
    subgroup.end_parameter = end;
    subgroups_.push_back(subgroup);
  }
}

}  // namespace optstate
