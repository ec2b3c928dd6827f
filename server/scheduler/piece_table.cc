#include "server/scheduler/piece_table.h"

#include <algorithm>

namespace optstate::scheduler {

PieceTable::PieceTable(uint32_t parameter_count,
                       absl::Span<const RankPartition> partitions)
    : first_(parameter_count + 1, 0) {
  for (const RankPartition& partition : partitions) {
    for (const Piece& piece : partition.pieces) ++first_[piece.parameter + 1];
  }
  for (uint32_t p = 0; p < parameter_count; ++p) first_[p + 1] += first_[p];
  entries_.resize(first_.back());
  std::vector<uint64_t> next(first_.begin(), first_.end() - 1);
  for (uint32_t rank = 0; rank < partitions.size(); ++rank) {
    for (const Piece& piece : partitions[rank].pieces) {
      entries_[next[piece.parameter]++] = {rank, piece.begin,
                                           piece.begin + piece.numel,
                                           piece.gradient_offset_bytes};
    }
  }
  for (uint32_t p = 0; p < parameter_count; ++p) {
    const auto begin = entries_.begin() + static_cast<int64_t>(first_[p]);
    const auto end = entries_.begin() + static_cast<int64_t>(first_[p + 1]);
    std::sort(begin, end,
              [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
  }
}

}  // namespace optstate::scheduler
