#include "storage/tiers/host_store.h"

namespace optstate::storage {

RecordView HostStore::record(size_t sub_group) const {
  const SubGroup& range = sub_groups()[sub_group];
  RecordView::Bases bases;
  const auto place = [&](int part, std::byte* array) {
    if (array == nullptr) return;
    bases.parts[static_cast<size_t>(part)] =
        array + PartBytesOf(layout(), part, range.begin, 0).begin;
  };
  place(kMasterPart, arrays().master);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout().has_state_array(k, range.group)) continue;
    const auto index = static_cast<size_t>(k);
    place(kStatePart0 + k, arrays().state[index]);
    place(kScalePart0 + k, reinterpret_cast<std::byte*>(arrays().scale[index]));
  }
  bases.parameter_area = arrays().parameters;
  return {&layout(), &range, bases};
}

}  // namespace optstate::storage
