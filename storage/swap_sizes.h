#ifndef OPTSTATE_STORAGE_SWAP_SIZES_H_
#define OPTSTATE_STORAGE_SWAP_SIZES_H_

#include <cstdint>
#include <vector>

namespace optstate::storage {

// The sizes of a job whose records are swapped between frames in memory and
// files on disk, in bytes.
struct SwapSizes {
  uint64_t frame = 0;
  uint64_t records = 0;  // how many there are
  uint64_t table = 0;
  uint64_t disk = 0;                       // over all directories
  std::vector<uint64_t> directories = {};  // the part of each
  // The part of each that records take.
  std::vector<uint64_t> records_by_directory = {};
  uint64_t section = 0;  // the largest, of the parameters of a record
};

// With fewer frames, reading, updating and writing could not overlap.
inline constexpr uint64_t kSwapFramesMin = 3;
// With one section alone, nothing could be read while it is used.
inline constexpr uint64_t kSwapCacheSectionsMin = 2;

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_SWAP_SIZES_H_
