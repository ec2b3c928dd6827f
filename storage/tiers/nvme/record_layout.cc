#include "storage/tiers/nvme/record_layout.h"

#include <algorithm>
#include <cstring>

#include "proto/types/array_format.h"
#include "storage/format/checksum.h"
#include "storage/io/io_engine.h"
#include "storage/state_scales.h"

namespace optstate::nvme {
namespace {

constexpr uint64_t kPartAlignBytes = 64;

uint64_t RoundUp(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Returns the number of a record's tiles, counted from its own beginning: a
// record of whole parameters may end within one.
uint64_t TilesOf(const SubGroup& sub_group) {
  return (sub_group.elements() + kTileElements - 1) / kTileElements;
}

}  // namespace

RecordLayout::RecordLayout(const Layout* layout,
                           const SubGroupTable* sub_groups,
                           RecordSection section)
    : layout_(layout),
      sub_groups_(sub_groups),
      section_(section),
      frame_bytes_(io::kSectorBytes) {
  if (section == RecordSection::kNone) {
    section_ = RecordSection::kMasters;
    for (uint32_t p = 0; p < layout->parameters().size(); ++p) {
      if (IsPartOfMaster(p)) section_ = RecordSection::kNone;
    }
  }
  for (uint32_t p = 0; p < layout->parameters().size(); ++p) {
    if (!HasInSection(p)) continue;
    parameter_element_bytes_ = std::max<uint64_t>(
        parameter_element_bytes_, SizeInBytes(layout->parameters()[p].dtype));
  }
  places_.reserve(sub_groups->size());
  for (const SubGroup& sub_group : sub_groups->all()) {
    Place place = MakePlace(sub_group);
    place.first_checksum = tile_count_;
    tile_count_ += TilesOf(sub_group);
    record_checksums_max_ =
        std::max(record_checksums_max_, TilesOf(sub_group) + 1);
    frame_bytes_ = std::max(frame_bytes_, place.bytes);
    section_bytes_max_ =
        std::max(section_bytes_max_, place.bytes - place.state_bytes);
    places_.push_back(place);
  }
  checksum_count_ = tile_count_ + places_.size();
}

bool RecordLayout::HasPart(const SubGroup& sub_group, int part) const {
  if (part == storage::kMasterPart) {
    for (uint32_t p = sub_group.first_parameter; p < sub_group.end_parameter;
         ++p) {
      if (layout_->master_format(p) != MasterFormat::kParameter) return true;
    }
    return false;
  }
  const int k = (part - storage::kStatePart0) % kStateArraysMax;
  if (!layout_->has_state_array(k, sub_group.group)) return false;
  return part < storage::kScalePart0 ||
         storage::HasScales(ArrayFormat(*layout_, k));
}

RecordLayout::Place RecordLayout::MakePlace(const SubGroup& sub_group) const {
  Place place;
  place.parts.fill(kNone);
  uint64_t end = 0;
  const auto add = [&](int part) {
    if (!HasPart(sub_group, part)) return;
    place.parts[static_cast<size_t>(part)] = end;
    end += RoundUp(
        storage::PartBytesOf(*layout_, part, 0, sub_group.elements()).end,
        kPartAlignBytes);
  };
  for (int part = storage::kStatePart0; part < storage::kRecordPartCount;
       ++part) {
    add(part);
  }
  add(storage::kMasterPart);
  // A record without arrays takes a sector too, so that it is read and written
  // like all others.
  place.state_bytes =
      RoundUp(std::max(end, io::kSectorBytes), io::kSectorBytes);
  bool keeps = false;
  for (uint32_t p = sub_group.first_parameter; p < sub_group.end_parameter;
       ++p) {
    keeps |= HasInSection(p);
  }
  place.parameter_bytes =
      keeps ? sub_group.elements() * parameter_element_bytes_ : 0;
  place.bytes =
      place.state_bytes + RoundUp(place.parameter_bytes, io::kSectorBytes);
  return place;
}

storage::RecordView RecordLayout::ViewOf(uint32_t sub_group, std::byte* frame,
                                         std::byte* parameter_area) const {
  const Place& place = places_[sub_group];
  storage::RecordView::Bases bases;
  for (size_t part = 0; part < place.parts.size(); ++part) {
    if (place.parts[part] != kNone) {
      bases.parts[part] = frame + place.parts[part];
    }
  }
  if (section_ == RecordSection::kAll) {
    bases.parameters = frame + place.state_bytes;
    bases.parameter_pitch_bytes = parameter_element_bytes_;
  } else {
    bases.parameter_area = parameter_area;
  }
  return {layout_, &(*sub_groups_)[sub_group], bases};
}

storage::RecordView RecordLayout::SectionView(uint32_t sub_group,
                                              std::byte* section) const {
  storage::RecordView::Bases bases;
  bases.parameters = section;
  bases.parameter_pitch_bytes = parameter_element_bytes_;
  return {layout_, &(*sub_groups_)[sub_group], bases};
}

// Calls visit(offset in the section, offset in the area, bytes) for each kept
// parameter's part in the sub-group.
template <typename Visitor>
void RecordLayout::ForEachParameter(uint32_t sub_group,
                                    const Visitor& visit) const {
  const Place& place = places_[sub_group];
  if (place.parameter_bytes == 0) return;
  const SubGroup& range = (*sub_groups_)[sub_group];
  for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
    if (!HasInSection(p)) continue;
    const ParameterSpec& spec = layout_->parameters()[p];
    const uint64_t flat = layout_->flat_offset(p);
    const uint64_t begin = std::max(flat, range.begin);
    const uint64_t end =
        std::min(flat + static_cast<uint64_t>(spec.numel), range.end);
    if (begin >= end) continue;
    const uint64_t element_bytes = SizeInBytes(spec.dtype);
    visit((begin - range.begin) * parameter_element_bytes_,
          layout_->parameter_offset_bytes(p) + (begin - flat) * element_bytes,
          (end - begin) * element_bytes);
  }
}

void RecordLayout::TakeParameters(uint32_t sub_group,
                                  const std::byte* parameter_area,
                                  std::byte* frame) const {
  std::byte* const section = frame + section_begin(sub_group);
  ForEachParameter(sub_group, [&](uint64_t to, uint64_t from, uint64_t bytes) {
    std::memcpy(section + to, parameter_area + from, bytes);
  });
}

void RecordLayout::PutParameters(uint32_t sub_group, const std::byte* frame,
                                 std::byte* parameter_area) const {
  const std::byte* const section = frame + section_begin(sub_group);
  ForEachParameter(sub_group, [&](uint64_t from, uint64_t to, uint64_t bytes) {
    std::memcpy(parameter_area + to, section + from, bytes);
  });
}

bool RecordLayout::IsSameRecord(const RecordLayout& other,
                                uint32_t sub_group) const {
  const SubGroup& here = (*sub_groups_)[sub_group];
  const SubGroup& there = (*other.sub_groups_)[sub_group];
  return here.begin == there.begin && here.end == there.end &&
         here.first_parameter == there.first_parameter &&
         here.end_parameter == there.end_parameter &&
         places_[sub_group].parts == other.places_[sub_group].parts;
}

void RecordLayout::CopyFrom(const RecordLayout& other, uint32_t sub_group,
                            const std::byte* other_frame, bool with_parameters,
                            std::byte* frame) const {
  std::memcpy(frame, other_frame, state_bytes(sub_group));
  if (!with_parameters) return;
  std::byte* const section = frame + section_begin(sub_group);
  const std::byte* const other_section =
      other_frame + other.section_begin(sub_group);
  std::memset(section, 0, section_bytes(sub_group));
  // Both visit the same parameters, in order.
  std::vector<uint64_t> from;
  other.ForEachParameter(
      sub_group, [&](uint64_t at, uint64_t /*area*/, uint64_t /*bytes*/) {
        from.push_back(at);
      });
  size_t i = 0;
  ForEachParameter(
      sub_group, [&](uint64_t at, uint64_t /*area*/, uint64_t bytes) {
        std::memcpy(section + at, other_section + from[i++], bytes);
      });
}

uint32_t RecordLayout::TileChecksum(uint32_t sub_group, uint64_t tile,
                                    const std::byte* frame) const {
  const Place& place = places_[sub_group];
  const uint64_t begin = tile * kTileElements;
  const uint64_t numel =
      std::min(kTileElements, (*sub_groups_)[sub_group].elements() - begin);
  uint32_t checksum = 0;
  for (size_t part = 0; part < place.parts.size(); ++part) {
    if (place.parts[part] == kNone) continue;
    const storage::PartBytes bytes =
        storage::PartBytesOf(*layout_, static_cast<int>(part), begin, numel);
    checksum =
        storage::ExtendCrc32c(checksum, frame + place.parts[part] + bytes.begin,
                              bytes.end - bytes.begin);
  }
  return checksum;
}

uint32_t RecordLayout::SectionSum(uint32_t sub_group,
                                  const std::byte* section) const {
  uint32_t checksum = 0;
  ForEachParameter(
      sub_group, [&](uint64_t at, uint64_t /*area*/, uint64_t bytes) {
        checksum = storage::ExtendCrc32c(checksum, section + at, bytes);
      });
  return checksum;
}

void RecordLayout::Sum(uint32_t sub_group, const std::byte* frame,
                       bool with_parameters, absl::Span<uint32_t> sums) const {
  const uint64_t tiles = TilesOf((*sub_groups_)[sub_group]);
  for (uint64_t tile = 0; tile < tiles; ++tile) {
    sums[tile] = TileChecksum(sub_group, tile, frame);
  }
  if (with_parameters) {
    sums[tiles] = SectionSum(sub_group, frame + section_begin(sub_group));
  }
}

void RecordLayout::PutSums(uint32_t sub_group, absl::Span<const uint32_t> sums,
                           bool with_parameters,
                           absl::Span<uint32_t> checksums) const {
  const uint64_t first = places_[sub_group].first_checksum;
  const uint64_t tiles = TilesOf((*sub_groups_)[sub_group]);
  std::copy_n(sums.begin(), tiles,
              checksums.begin() + static_cast<ptrdiff_t>(first));
  if (with_parameters) checksums[tile_count_ + sub_group] = sums[tiles];
}

void RecordLayout::TakeSums(uint32_t sub_group,
                            absl::Span<const uint32_t> checksums,
                            absl::Span<uint32_t> sums) const {
  const uint64_t first = places_[sub_group].first_checksum;
  const uint64_t tiles = TilesOf((*sub_groups_)[sub_group]);
  std::copy_n(checksums.begin() + static_cast<ptrdiff_t>(first), tiles,
              sums.begin());
  sums[tiles] = checksums[tile_count_ + sub_group];
}

void RecordLayout::CopyChecksums(uint32_t sub_group,
                                 absl::Span<const uint32_t> from,
                                 absl::Span<uint32_t> to) const {
  const uint64_t first = places_[sub_group].first_checksum;
  const uint64_t tiles = TilesOf((*sub_groups_)[sub_group]);
  std::copy_n(from.begin() + static_cast<ptrdiff_t>(first), tiles,
              to.begin() + static_cast<ptrdiff_t>(first));
  to[tile_count_ + sub_group] = from[tile_count_ + sub_group];
}

int64_t RecordLayout::FirstDifference(
    uint32_t sub_group, const std::byte* frame, bool with_parameters,
    absl::Span<const uint32_t> checksums) const {
  const uint64_t first = places_[sub_group].first_checksum;
  const uint64_t tiles = TilesOf((*sub_groups_)[sub_group]);
  return Compare(sub_group, frame, with_parameters,
                 checksums.subspan(first, tiles),
                 checksums[tile_count_ + sub_group]);
}

int64_t RecordLayout::FirstDifferenceOf(uint32_t sub_group,
                                        const std::byte* frame,
                                        bool with_parameters,
                                        absl::Span<const uint32_t> sums) const {
  const uint64_t tiles = TilesOf((*sub_groups_)[sub_group]);
  return Compare(sub_group, frame, with_parameters, sums.first(tiles),
                 sums[tiles]);
}

int64_t RecordLayout::Compare(uint32_t sub_group, const std::byte* frame,
                              bool with_parameters,
                              absl::Span<const uint32_t> tiles,
                              uint32_t parameters) const {
  for (uint64_t tile = 0; tile < tiles.size(); ++tile) {
    if (tiles[tile] != TileChecksum(sub_group, tile, frame)) {
      return static_cast<int64_t>(tile);
    }
  }
  if (with_parameters &&
      parameters != SectionSum(sub_group, frame + section_begin(sub_group))) {
    return static_cast<int64_t>(tiles.size());
  }
  return -1;
}

}  // namespace optstate::nvme
