#include "storage/record_view.h"

namespace optstate::storage {

PartBytes PartBytesOf(const Layout& layout, int part, uint64_t flat_begin,
                      uint64_t numel) {
  if (part >= kScalePart0) {
    const uint64_t first = flat_begin / kQuantizedBlockElements;
    const uint64_t blocks =
        (numel + kQuantizedBlockElements - 1) / kQuantizedBlockElements;
    return {first * sizeof(float), (first + blocks) * sizeof(float)};
  }
  const uint64_t element_bytes =
      part == kMasterPart
          ? SizeInBytes(layout.master_format())
          : SizeInBytes(ArrayFormat(layout, part - kStatePart0));
  return {flat_begin * element_bytes, (flat_begin + numel) * element_bytes};
}

}  // namespace optstate::storage
