#ifndef OPTSTATE_STORAGE_RECORD_SPLIT_H_
#define OPTSTATE_STORAGE_RECORD_SPLIT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace optstate::storage {

// The split of a job's records over its directories on disk, by weights: a
// directory of twice the weight gets twice as many records. They are numbers in
// proportion to what the disks can do, such as MB/s; 0: the directory gets
// none. No weights: equal parts.
//
// The split is part of what a job has on disk, so it never changes for the same
// weights. Byte by byte: FORMAT.md.

inline constexpr uint32_t kDirectoryWeightMax = 1'000'000;

// Returns INVALID_ARGUMENT unless there are no weights, or one for each
// directory, at most kDirectoryWeightMax and not all 0.
absl::Status CheckWeights(absl::Span<const uint32_t> weights,
                          size_t directories);

// Returns weights that split in the same way and are as small as can be; none
// when all are equal. `weights` are valid.
std::vector<uint32_t> SmallestWeights(absl::Span<const uint32_t> weights);

// Returns weights in proportion to what directories move in a second, in their
// smallest form. Rates within a tenth of each other count as one, and each is
// rounded to a tenth of the least. None, for equal parts, also when one is not
// known (0).
std::vector<uint32_t> WeightsByRate(absl::Span<const double> bytes_per_s);

// Returns the directory of each record. Neighbours are in different directories
// as far as the weights allow, so that they are read and written side by side;
// with equal weights record r is in directory r % n.
std::vector<uint32_t> SplitRecords(uint32_t records, size_t directories,
                                   absl::Span<const uint32_t> weights);

// Returns "3:1", or "equal parts".
std::string WeightsText(absl::Span<const uint32_t> weights);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_RECORD_SPLIT_H_
