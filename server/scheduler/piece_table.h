#ifndef OPTSTATE_SERVER_SCHEDULER_PIECE_TABLE_H_
#define OPTSTATE_SERVER_SCHEDULER_PIECE_TABLE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/partition.h"

namespace optstate::scheduler {

// The pieces of all ranks by parameter: the location of each rank's gradient.
class PieceTable {
 public:
  struct Entry {
    uint32_t rank = 0;
    uint64_t begin = 0;  // element of the parameter
    uint64_t end = 0;
    uint64_t gradient_offset_bytes = 0;  // in the rank's gradient area
  };

  PieceTable(uint32_t parameter_count,
             absl::Span<const RankPartition> partitions);

  // Returns the pieces in order of begin; never empty: a parameter without
  // elements has one piece without elements.
  absl::Span<const Entry> pieces(uint32_t parameter) const {
    return absl::MakeConstSpan(entries_).subspan(
        first_[parameter], first_[parameter + 1] - first_[parameter]);
  }

 private:
  std::vector<uint64_t> first_;  // by parameter, and the total
  std::vector<Entry> entries_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PIECE_TABLE_H_
