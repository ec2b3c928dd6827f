#include "storage/tiers/nvme/frame_table.h"

#include <cstddef>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/format/checksum.h"
#include "storage/persist_in_order.h"

namespace optstate::nvme {
namespace {

constexpr uint64_t kMagic = 0x31454d4152464f53;  // "SOFRAME1"
// A table with nothing that came later is of the first version. Each bit of the
// version less 1 is one thing that it has, so that a build which does not know
// the thing refuses the table, and opens all that are without.
constexpr uint32_t kVersion = 1;
constexpr uint32_t kWeightsBit = 1;
constexpr uint32_t kLacksSectionsBit = 2;

uint32_t VersionOf(const FrameTable::Shape& shape) {
  return kVersion + (shape.weights.empty() ? 0 : kWeightsBit) +
         (shape.lacks_sections ? kLacksSectionsBit : 0);
}

bool IsKnown(uint32_t version) {
  return version >= kVersion &&
         version <= kVersion + kWeightsBit + kLacksSectionsBit;
}

bool HasWeights(uint32_t version) {
  return IsKnown(version) && ((version - kVersion) & kWeightsBit) != 0;
}

// A place as it is stored: the frame's index plus 1 in the low half.
constexpr uint64_t kSlotBit = uint64_t{1} << 32;
constexpr uint64_t kOnDiskBit = uint64_t{1} << 33;
constexpr uint64_t kDirtyBit = uint64_t{1} << 34;
constexpr int kCheckShift = 40;

// Returns a place with its check bits: 24 of a checksum of the record's index
// and of the place.
uint64_t WithCheck(uint32_t record, uint64_t place) {
  const uint64_t fields[] = {record, place};
  return place | uint64_t{storage::Crc32c(fields, sizeof(fields))}
                     << kCheckShift;
}

}  // namespace

struct FrameTable::Header {
  std::atomic<uint64_t> magic;  // set last: the table is whole
  uint32_t version;
  uint32_t slots;
  uint32_t paths;
  uint32_t crc32c;  // of the fields before and behind, without magic and frames
  uint64_t incarnation;
  uint64_t records;
  uint64_t checksums;
  uint64_t frame_bytes;
  uint32_t frames;
  uint32_t is_syncing;
};

uint64_t FrameTable::WeightsOffset(const Header& header) {
  return sizeof(Header) + header.records * sizeof(uint64_t) +
         header.slots * header.checksums * sizeof(uint32_t);
}

uint32_t FrameTable::Checksum() const {
  const Header& header = this->header();
  uint32_t crc =
      storage::ExtendCrc32c(0, &header.version, 3 * sizeof(uint32_t));
  crc = storage::ExtendCrc32c(crc, &header.incarnation, 4 * sizeof(uint64_t));
  if (!HasWeights(header.version)) return crc;
  return storage::ExtendCrc32c(crc, bytes_.data() + WeightsOffset(header),
                               header.paths * sizeof(uint32_t));
}

absl::StatusOr<std::vector<uint32_t>> FrameTable::ReadWeights(
    absl::Span<const std::byte> bytes) {
  Header header;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof(header));
  std::vector<uint32_t> weights;
  if (!HasWeights(header.version)) return weights;
  // Each is checked by itself first, so that their sum cannot wrap.
  const uint64_t size = bytes.size();
  if (header.records > size || header.checksums > size || header.slots > 2 ||
      header.paths > size ||
      WeightsOffset(header) + header.paths * sizeof(uint32_t) > size) {
    return absl::DataLossError(
        absl::StrCat("frame_table has ", size,
                     " bytes, its header asks for more: it is damaged"));
  }
  weights.resize(header.paths);
  if (weights.empty()) return weights;  // without data, which memcpy refuses
  std::memcpy(weights.data(), bytes.data() + WeightsOffset(header),
              header.paths * sizeof(uint32_t));
  return weights;
}

uint64_t FrameTable::BytesNeeded(const Shape& shape) {
  static_assert(sizeof(Header) == 64);
  static_assert(offsetof(Header, version) == 8);
  static_assert(offsetof(Header, crc32c) == 20);
  static_assert(offsetof(Header, incarnation) == 24);
  static_assert(offsetof(Header, frame_bytes) == 48);
  static_assert(offsetof(Header, frames) == 56);
  static_assert(offsetof(Header, is_syncing) == 60);
  return sizeof(Header) + shape.records * sizeof(uint64_t) +
         shape.slots * shape.checksums * sizeof(uint32_t) +
         shape.weights.size() * sizeof(uint32_t);
}

bool FrameTable::IsMade(absl::Span<const std::byte> bytes) {
  uint64_t magic = 0;
  if (bytes.size() < sizeof(Header)) return false;
  std::memcpy(&magic, bytes.data(), sizeof(magic));
  return magic != 0;
}

uint64_t FrameTable::FrameBytesOf(absl::Span<const std::byte> bytes) {
  if (!IsMade(bytes)) return 0;
  const auto& header = *reinterpret_cast<const Header*>(bytes.data());
  return header.frames * header.frame_bytes;
}

bool FrameTable::HasSections(absl::Span<const std::byte> bytes) {
  if (!IsMade(bytes)) return false;
  const auto& header = *reinterpret_cast<const Header*>(bytes.data());
  return IsKnown(header.version) &&
         ((header.version - kVersion) & kLacksSectionsBit) == 0;
}

FrameTable::Header& FrameTable::header() const {
  return *reinterpret_cast<Header*>(bytes_.data());
}

std::atomic<uint64_t>& FrameTable::word(uint32_t record) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(bytes_.data() +
                                                  sizeof(Header))[record];
}

void FrameTable::Make(const Shape& shape) {
  Header& header = this->header();
  header.version = VersionOf(shape);
  header.slots = shape.slots;
  header.paths = shape.paths;
  header.incarnation = shape.incarnation;
  header.records = shape.records;
  header.checksums = shape.checksums;
  header.frame_bytes = shape.frame_bytes;
  header.frames = static_cast<uint32_t>(shape.frames);
  header.is_syncing = 0;
  if (!shape.weights.empty()) {
    std::memcpy(bytes_.data() + WeightsOffset(header), shape.weights.data(),
                shape.weights.size() * sizeof(uint32_t));
  }
  header.crc32c = Checksum();
  for (uint32_t i = 0; i < shape.records; ++i) SetPlace(i, {});
  storage::PersistInOrder(storage::PersistPoint::kFrameTableMagic);
  header.magic.store(kMagic, std::memory_order_release);
}

absl::Status FrameTable::Check(const Shape& shape) const {
  if (bytes_.size() < BytesNeeded(shape)) {
    return absl::DataLossError(absl::StrCat("frame_table has ", bytes_.size(),
                                            " bytes, it must have ",
                                            BytesNeeded(shape)));
  }
  const Header& header = this->header();
  const auto differs = [](absl::string_view what, uint64_t found,
                          uint64_t expected) {
    return absl::DataLossError(absl::StrCat("frame_table: ", what, " is ",
                                            found, ", it must be ", expected));
  };
  const uint64_t magic = header.magic.load(std::memory_order_acquire);
  if (magic != kMagic) return differs("magic", magic, kMagic);
  const uint32_t version = VersionOf(shape);
  if (header.version != version) {
    return differs("version", header.version, version);
  }
  // Weights, which follow the checksums, are only looked for where they can be.
  const bool has_places =
      WeightsOffset(header) <= bytes_.size() &&
      header.paths <=
          (bytes_.size() - WeightsOffset(header)) / sizeof(uint32_t);
  if (!shape.weights.empty() && !has_places) {
    return differs("size", bytes_.size(), BytesNeeded(shape));
  }
  if (header.crc32c != Checksum()) {
    return differs("checksum", header.crc32c, Checksum());
  }
  if (header.incarnation != shape.incarnation) {
    return differs("incarnation", header.incarnation, shape.incarnation);
  }
  if (header.records != shape.records) {
    return differs("number of records", header.records, shape.records);
  }
  if (header.checksums != shape.checksums) {
    return differs("number of checksums", header.checksums, shape.checksums);
  }
  if (header.frame_bytes != shape.frame_bytes) {
    return differs("size of a frame", header.frame_bytes, shape.frame_bytes);
  }
  if (header.slots != shape.slots) {
    return differs("number of slots", header.slots, shape.slots);
  }
  if (header.paths != shape.paths) {
    return differs("number of directories", header.paths, shape.paths);
  }
  std::vector<uint32_t> record_of(shape.frames, UINT32_MAX);
  for (uint32_t i = 0; i < shape.records; ++i) {
    OPTSTATE_RETURN_IF_ERROR(CheckPlace(i, shape));
    const RecordPlace record = place(i);
    if (record.frame == RecordPlace::kNoFrame) continue;
    if (record_of[record.frame] != UINT32_MAX) {
      return absl::DataLossError(
          absl::StrCat("frame_table: records ", record_of[record.frame],
                       " and ", i, " are both in frame ", record.frame));
    }
    record_of[record.frame] = i;
  }
  return absl::OkStatus();
}

absl::Status FrameTable::CheckPlace(uint32_t record, const Shape& shape) const {
  const uint64_t stored = word(record).load(std::memory_order_relaxed);
  const RecordPlace found = place(record);
  if (stored != WithCheck(record, stored & (kDirtyBit * 2 - 1))) {
    return absl::DataLossError(
        absl::StrCat("frame_table: the place of record ", record, ", ",
                     absl::Hex(stored, absl::kZeroPad16), ", is damaged"));
  }
  if (found.frame != RecordPlace::kNoFrame && found.frame >= shape.frames) {
    return absl::DataLossError(absl::StrCat("frame_table: record ", record,
                                            " is in frame ", found.frame,
                                            " of ", shape.frames));
  }
  if (found.slot >= shape.slots) {
    return absl::DataLossError(absl::StrCat("frame_table: record ", record,
                                            " is in slot ", found.slot, " of ",
                                            shape.slots));
  }
  return absl::OkStatus();
}

void FrameTable::SetFrames(uint64_t frames) {
  header().frames = static_cast<uint32_t>(frames);
}

bool FrameTable::is_syncing() const { return header().is_syncing != 0; }

void FrameTable::SetSyncing(bool is_syncing) {
  storage::PersistInOrder(storage::PersistPoint::kFrameTableSyncing);
  header().is_syncing = is_syncing ? 1 : 0;
  storage::PersistInOrder(storage::PersistPoint::kFrameTableSyncingStored);
}

RecordPlace FrameTable::place(uint32_t record) const {
  const uint64_t stored = word(record).load(std::memory_order_relaxed);
  RecordPlace place;
  place.frame = static_cast<uint32_t>(stored) - 1;  // 0: kNoFrame
  place.slot = (stored & kSlotBit) != 0 ? 1 : 0;
  place.is_on_disk = (stored & kOnDiskBit) != 0;
  place.is_dirty = (stored & kDirtyBit) != 0;
  return place;
}

void FrameTable::SetPlace(uint32_t record, const RecordPlace& place) {
  const uint64_t stored = static_cast<uint32_t>(place.frame + 1) |
                          (place.slot != 0 ? kSlotBit : 0) |
                          (place.is_on_disk ? kOnDiskBit : 0) |
                          (place.is_dirty ? kDirtyBit : 0);
  storage::PersistInOrder(storage::PersistPoint::kRecordPlace);
  word(record).store(WithCheck(record, stored), std::memory_order_relaxed);
  storage::PersistInOrder(storage::PersistPoint::kRecordPlaceStored);
}

absl::Span<uint32_t> FrameTable::checksums(uint32_t slot) const {
  const Header& header = this->header();
  auto* const first = reinterpret_cast<uint32_t*>(
      bytes_.data() + sizeof(Header) + header.records * sizeof(uint64_t));
  return {first + slot * header.checksums, header.checksums};
}

}  // namespace optstate::nvme
