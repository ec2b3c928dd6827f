#include "server/scheduler/gradient_addresses.h"

namespace optstate::scheduler {

absl::Span<const void* const> GradientAddresses::OfRanks(
    uint32_t parameter, uint64_t offset_bytes,
    absl::Span<const std::byte* const> gradient_areas, HasPushed has_pushed,
    Buffer* buffer) {
  size_t count = 0;
  for (uint32_t rank = 0; rank < gradient_areas.size(); ++rank) {
    if (!has_pushed(rank, parameter)) continue;
    (*buffer)[count++] = gradient_areas[rank] + offset_bytes;
  }
  return absl::MakeConstSpan(*buffer).first(count);
}

absl::Span<const void* const> GradientAddresses::OfUpdate(
    uint32_t parameter, const PieceTable::Entry& piece, uint64_t begin,
    const StepUpdate& update, Buffer* buffer) const {
  if (!plan_.accumulates()) {
    return Pushed(
        parameter, piece, begin, update.gradient_areas,
        [&](uint32_t rank, uint32_t p) { return update.HasPushed(rank, p); },
        buffer);
  }
  (*buffer)[0] = store_.sums(parameter, begin);
  return absl::MakeConstSpan(*buffer).first(1);
}

}  // namespace optstate::scheduler
