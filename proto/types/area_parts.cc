#include "proto/types/area_parts.h"

#include <algorithm>

#include "proto/types/dtype.h"

namespace optstate {

uint64_t NextCut(const Layout& layout, uint32_t parameter, uint64_t element) {
  const ParameterSpec& spec = layout.parameters()[parameter];
  const auto numel = static_cast<uint64_t>(spec.numel);
  if (numel <= kPartElements) return numel;
  // The offset counts from the group's beginning, as for sub-groups.
  const uint64_t offset =
      layout.flat_offset(parameter) - layout.group_begin(spec.group);
  const uint64_t cut =
      ((offset + element) / kPartElements + 1) * kPartElements - offset;
  return std::min(cut, numel);
}

std::vector<AreaPart> AreaParts(const Layout& layout, uint64_t bytes_max) {
  std::vector<AreaPart> parts;
  bool may_grow = false;
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const ParameterSpec& spec = layout.parameters()[p];
    const auto numel = static_cast<uint64_t>(spec.numel);
    if (numel == 0) continue;
    const uint64_t element_bytes = SizeInBytes(spec.dtype);
    const uint64_t offset = layout.parameter_offset_bytes(p);
    const uint64_t end = offset + numel * element_bytes;
    if (may_grow && numel <= kPartElements &&
        end - parts.back().begin <= bytes_max) {
      parts.back().end = end;
      parts.back().end_run = layout.first_run(p + 1);
      continue;
    }
    for (uint64_t first = 0; first < numel;) {
      const uint64_t last = NextCut(layout, p, first);
      parts.push_back({.begin = offset + first * element_bytes,
                       .end = offset + last * element_bytes,
                       .first_run = layout.run_of(p, first),
                       .end_run = layout.run_of(p, last - 1) + 1});
      first = last;
    }
    may_grow = numel <= kPartElements;
  }
  return parts;
}

}  // namespace optstate
