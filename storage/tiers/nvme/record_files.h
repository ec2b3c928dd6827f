#ifndef OPTSTATE_STORAGE_TIERS_NVME_RECORD_FILES_H_
#define OPTSTATE_STORAGE_TIERS_NVME_RECORD_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/arrangement.h"
#include "storage/io/io_engine.h"
#include "storage/tiers/nvme/record_layout.h"

namespace optstate::nvme {

// The files `records` of a job (`records.1` of arrangements with an odd
// number), one in each of its directories on disk, or extents of devices in
// their place: each record has one place or two (slots) in one of them, which
// SplitRecords() says.
//
// Threads: immutable after Create and Open.
class RecordFiles {
 public:
  struct Place {
    io::FileId file;
    uint64_t offset_bytes = 0;
  };

  // The shape that the files are made for.
  struct Shape {
    absl::Span<const std::string> directories;
    absl::Span<const uint32_t> weights;  // none: equal parts
    uint32_t records = 0;
    uint32_t slots = 1;
    absl::Span<const storage::DeviceExtent> extents = {};  // see Arrangement
    uint32_t arrangement = 0;                              // "
  };

  // Returns the bytes of each file.
  static std::vector<uint64_t> BytesNeeded(const RecordLayout& layout,
                                           uint32_t directories,
                                           absl::Span<const uint32_t> weights,
                                           uint32_t records, uint32_t slots);
  // Makes the files, reserved whole, and opens the extents; on an error no file
  // is left. `engine` outlives this.
  static absl::StatusOr<RecordFiles> Create(io::IoEngine* engine,
                                            const RecordLayout& layout,
                                            const Shape& shape);
  // Opens what Create made. DATA_LOSS: one is missing, or too short.
  static absl::StatusOr<RecordFiles> Open(io::IoEngine* engine,
                                          const RecordLayout& layout,
                                          const Shape& shape);
  // Removes the files of a job that arrangements with this number have, as far
  // as they are there; no extent.
  static absl::Status Remove(io::IoEngine* engine,
                             absl::Span<const std::string> directories,
                             uint32_t arrangement);
  void Close(io::IoEngine* engine) const;

  absl::Span<const io::FileId> files() const { return files_; }
  Place PlaceOf(uint32_t record, uint32_t slot) const {
    return {files_[split_[record]],
            offsets_[record] + slot * slot_bytes_[record]};
  }
  // Returns the index of the record's directory.
  uint32_t DirectoryOf(uint32_t record) const { return split_[record]; }
  // Returns the path of the file, or of the device, that has the record.
  const std::string& PathOf(uint32_t record) const {
    return paths_[split_[record]];
  }

 private:
  RecordFiles(const RecordLayout& layout, const Shape& shape);
  // Opens the directory's extent. DATA_LOSS: it is too short.
  absl::StatusOr<io::FileId> OpenExtent(io::IoEngine* engine,
                                        const std::string& directory,
                                        const storage::DeviceExtent& extent,
                                        uint64_t bytes) const;

  std::vector<std::string> paths_;    // by directory
  std::vector<io::FileId> files_;     // by directory
  std::vector<uint64_t> file_bytes_;  // "
  std::vector<uint32_t> split_;       // by record, its directory
  std::vector<uint64_t> offsets_;     // by record, of its first slot
  std::vector<uint64_t> slot_bytes_;  // by record
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_RECORD_FILES_H_
