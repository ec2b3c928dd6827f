#include "storage/state_records.h"

#include "proto/types/accumulation.h"

namespace optstate {

StateRecords::StateRecords(const Layout* layout, uint64_t sub_group_elements,
                           const StateArrays& arrays)
    : layout_(layout),
      sub_groups_(layout, sub_group_elements, SubGroupTable::CutOf(*layout)),
      arrays_(arrays) {
  if (arrays.gradient_accumulator != nullptr) {
    gradient_sum_offsets_ = GradientSumOffsets(*layout);
  }
}

RecordView StateRecords::record(size_t sub_group) const {
  const SubGroup& range = sub_groups_[sub_group];
  RecordView::Bases bases;
  const auto place = [&](int part, std::byte* array) {
    if (array == nullptr) return;
    bases.parts[static_cast<size_t>(part)] =
        array + PartBytesOf(*layout_, part, range.begin, 0).begin;
  };
  place(kMasterPart, arrays_.master);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout_->has_state_array(k, range.group)) continue;
    const auto index = static_cast<size_t>(k);
    place(kStatePart0 + k, arrays_.state[index]);
    place(kScalePart0 + k, reinterpret_cast<std::byte*>(arrays_.scale[index]));
  }
  if (arrays_.accumulator != nullptr) {
    bases.accumulator = arrays_.accumulator + range.begin;
  }
  bases.parameter_area = arrays_.parameters;
  bases.gradient_accumulator = arrays_.gradient_accumulator;
  bases.gradient_sum_offsets = gradient_sum_offsets_.data();
  return {layout_, &range, bases};
}

}  // namespace optstate
