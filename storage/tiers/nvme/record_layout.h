#ifndef OPTSTATE_STORAGE_TIERS_NVME_RECORD_LAYOUT_H_
#define OPTSTATE_STORAGE_TIERS_NVME_RECORD_LAYOUT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/sub_groups.h"
#include "storage/record_view.h"

namespace optstate::nvme {

// The parameters that a record's section has.
enum class RecordSection : uint8_t {
  // None: they live in the parameter area, and nothing of the job is to survive
  // a power cut.
  kNone,
  // Parameters that are a part of their masters, so that the record is complete
  // after a power cut. They live in the area, and while it lives the section is
  // not read. Jobs that former builds made have it in any case.
  kMasters,
  // All of them: there is no area, and they live in the section.
  kAll,
};

// The bytes of a record in a frame, and in the same way in a slot on disk: the
// state arrays with their scales, then the masters, then a section of
// parameters. Each array begins at a multiple of 64 bytes, and the record fills
// whole sectors.
//
// Immutable. Bytes: FORMAT.md.
// Size: a size and an offset for each part of a record.
class RecordLayout {
 public:
  // The first two must outlive this object.
  RecordLayout(const Layout* layout, const SubGroupTable* sub_groups,
               RecordSection section);

  // Returns what the sections have. It is kNone only where that leaves out a
  // parameter: else it says kMasters, which are the same bytes.
  RecordSection section() const { return section_; }
  // Returns the size of a frame: that of the largest record, and never 0.
  uint64_t frame_bytes() const { return frame_bytes_; }
  // Returns the size of a record without its parameters, in whole sectors.
  uint64_t state_bytes(uint32_t sub_group) const {
    return places_[sub_group].state_bytes;
  }
  // Returns the size of a record with its parameters, in whole sectors.
  uint64_t bytes(uint32_t sub_group) const { return places_[sub_group].bytes; }

  // Returns the offset of the section of parameters, and its size, both in
  // whole sectors.
  uint64_t section_begin(uint32_t sub_group) const {
    return places_[sub_group].state_bytes;
  }
  uint64_t section_bytes(uint32_t sub_group) const {
    return bytes(sub_group) - state_bytes(sub_group);
  }
  // Returns the size of the largest section; 0: none has any parameters.
  uint64_t section_bytes_max() const { return section_bytes_max_; }

  // Returns the record that lies in this frame. `parameter_area` is ignored
  // where the record holds the parameters.
  storage::RecordView ViewOf(uint32_t sub_group, std::byte* frame,
                             std::byte* parameter_area) const;
  // Returns a view of a record of which only the section is in memory: it has
  // parameters alone. The record holds them.
  storage::RecordView SectionView(uint32_t sub_group, std::byte* section) const;
  // Copies the parameters that are a part of their masters to the frame, and
  // from it.
  void TakeParameters(uint32_t sub_group, const std::byte* parameter_area,
                      std::byte* frame) const;
  void PutParameters(uint32_t sub_group, const std::byte* frame,
                     std::byte* parameter_area) const;

  // Returns whether a record has the same elements and arrays in another layout
  // of the job, so that CopyFrom() can have it.
  bool IsSameRecord(const RecordLayout& other, uint32_t sub_group) const;
  // Copies a record from a frame of another layout, in which parameters may
  // have another distance. Its checksums stay as they are.
  void CopyFrom(const RecordLayout& other, uint32_t sub_group,
                const std::byte* other_frame, bool with_parameters,
                std::byte* frame) const;

  // Returns the number of checksums of all records: one for each tile's state,
  // then one for each record's parameters.
  uint64_t checksum_count() const { return checksum_count_; }
  // Returns the largest number of checksums of one record.
  uint64_t record_checksums_max() const { return record_checksums_max_; }
  // Computes the checksum of the parameters from their section, and takes it
  // from the checksums of all records.
  uint32_t SectionSum(uint32_t sub_group, const std::byte* section) const;
  uint32_t section_sum(uint32_t sub_group,
                       absl::Span<const uint32_t> checksums) const {
    return checksums[tile_count_ + sub_group];
  }
  // Computes the record's checksums from a frame: those of its tiles, then that
  // of its parameters, which is left alone without `with_parameters`.
  void Sum(uint32_t sub_group, const std::byte* frame, bool with_parameters,
           absl::Span<uint32_t> sums) const;
  // Puts what Sum() computed to the checksums of all records, and takes it from
  // there.
  void PutSums(uint32_t sub_group, absl::Span<const uint32_t> sums,
               bool with_parameters, absl::Span<uint32_t> checksums) const;
  void TakeSums(uint32_t sub_group, absl::Span<const uint32_t> checksums,
                absl::Span<uint32_t> sums) const;
  // Copies the record's checksums.
  void CopyChecksums(uint32_t sub_group, absl::Span<const uint32_t> from,
                     absl::Span<uint32_t> to) const;
  // Compares a frame with checksums. Returns the index, within the record, of
  // the first tile that differs; the number of its tiles when the parameters
  // do; -1: all are equal.
  int64_t FirstDifference(uint32_t sub_group, const std::byte* frame,
                          bool with_parameters,
                          absl::Span<const uint32_t> checksums) const;
  // FirstDifference() from what TakeSums() took.
  int64_t FirstDifferenceOf(uint32_t sub_group, const std::byte* frame,
                            bool with_parameters,
                            absl::Span<const uint32_t> sums) const;

 private:
  struct Place {
    // Offsets of the arrays in the record; kNone: the record lacks the array.
    std::array<uint64_t, storage::kRecordPartCount> parts;
    uint64_t parameter_bytes = 0;
    uint64_t state_bytes = 0;  // where the section begins
    uint64_t bytes = 0;
    uint64_t first_checksum = 0;
  };
  static constexpr uint64_t kNone = UINT64_MAX;

  Place MakePlace(const SubGroup& sub_group) const;
  bool HasPart(const SubGroup& sub_group, int part) const;
  uint32_t TileChecksum(uint32_t sub_group, uint64_t tile,
                        const std::byte* frame) const;
  int64_t Compare(uint32_t sub_group, const std::byte* frame,
                  bool with_parameters, absl::Span<const uint32_t> tiles,
                  uint32_t parameters) const;
  bool IsPartOfMaster(uint32_t parameter) const {
    return layout_->master_format(parameter) != MasterFormat::kFloat32;
  }
  bool HasInSection(uint32_t parameter) const {
    return section_ == RecordSection::kAll ||
           (section_ == RecordSection::kMasters && IsPartOfMaster(parameter));
  }
  template <typename Visitor>
  void ForEachParameter(uint32_t sub_group, const Visitor& visit) const;

  const Layout* layout_;
  const SubGroupTable* sub_groups_;
  RecordSection section_;
  uint64_t parameter_element_bytes_ = 0;  // the widest that is kept
  uint64_t section_bytes_max_ = 0;
  std::vector<Place> places_;  // by sub-group
  uint64_t frame_bytes_;
  uint64_t tile_count_ = 0;
  uint64_t checksum_count_ = 0;
  uint64_t record_checksums_max_ = 1;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_RECORD_LAYOUT_H_
