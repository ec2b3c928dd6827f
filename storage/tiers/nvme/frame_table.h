#ifndef OPTSTATE_STORAGE_TIERS_NVME_FRAME_TABLE_H_
#define OPTSTATE_STORAGE_TIERS_NVME_FRAME_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace optstate::nvme {

// The place of one record.
struct RecordPlace {
  static constexpr uint32_t kNoFrame = UINT32_MAX;

  uint32_t frame = kNoFrame;
  // The slot on disk that has the record's last bytes written, if any has.
  uint32_t slot = 0;
  bool is_on_disk = false;
  // The frame is newer than the slot, or may be.
  bool is_dirty = false;
};

// The file `frame_table` of a job with swapped records, in host memory beside
// the frames: which record is in which frame and slot, and the checksums of
// both slots. Byte by byte: FORMAT.md.
//
// The table outlives the engine. A record's place is one 8-byte store, so the
// engine that opens the table after another's death finds each record in
// exactly one place. A frame that a place names is whole: it is named after it
// was read and checked, and given up before it is used for another record. Each
// place has check bits, so that a damaged one is noticed when the table is
// opened.
//
// Threads: places may be read and set by one thread each at a time.
class FrameTable {
 public:
  static constexpr int kSlotsMax = 2;

  struct Shape {
    uint64_t incarnation = 0;  // of the job
    uint64_t records = 0;
    uint64_t checksums = 0;  // of a slot
    uint64_t frames = 0;
    uint64_t frame_bytes = 0;
    uint32_t slots = 1;
    uint32_t paths = 1;  // directories over which records are spread
    // Weights of these directories, in their smallest form; none: equal parts.
    std::vector<uint32_t> weights = {};
    // Records lack the sections that they would have: RecordSection::kNone.
    bool lacks_sections = false;
  };

  static uint64_t BytesNeeded(const Shape& shape);
  // Says whether the table was made. `bytes` are those of the file.
  static bool IsMade(absl::Span<const std::byte> bytes);

  // Returns the bytes of all frames that the table was made for; 0: it was not
  // made.
  static uint64_t FrameBytesOf(absl::Span<const std::byte> bytes);

  // Says whether the table was made for records with all their sections, as
  // former builds made them for every job.
  static bool HasSections(absl::Span<const std::byte> bytes);

  // Returns the weights that a table was made with. DATA_LOSS: it is too short
  // to have them.
  static absl::StatusOr<std::vector<uint32_t>> ReadWeights(
      absl::Span<const std::byte> bytes);

  FrameTable() = default;
  // Uses the table in `bytes`, which outlive this.
  explicit FrameTable(absl::Span<std::byte> bytes) : bytes_(bytes) {}

  // Makes a table: no record has been written anywhere.
  void Make(const Shape& shape);
  // Returns DATA_LOSS when the table is not of this job and shape, or two
  // records claim one frame. The number of frames may differ, when no record
  // claims one that is gone.
  absl::Status Check(const Shape& shape) const;
  // Changes the number of frames that the table was made for.
  void SetFrames(uint64_t frames);
  // Says whether a sync of the records has begun and not succeeded since: reads
  // may then see bytes that no later sync makes durable.
  bool is_syncing() const;
  void SetSyncing(bool is_syncing);

  RecordPlace place(uint32_t record) const;
  void SetPlace(uint32_t record, const RecordPlace& place);
  absl::Span<uint32_t> checksums(uint32_t slot) const;

 private:
  struct Header;
  Header& header() const;
  // Returns the place of the weights, which follow the checksums.
  static uint64_t WeightsOffset(const Header& header);
  uint32_t Checksum() const;
  std::atomic<uint64_t>& word(uint32_t record) const;
  absl::Status CheckPlace(uint32_t record, const Shape& shape) const;

  absl::Span<std::byte> bytes_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_FRAME_TABLE_H_
