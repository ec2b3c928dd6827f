#include "server/session/transfer/staged_load.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "proto/types/status_macros.h"
#include "server/session/transfer/damaged_records.h"

namespace optstate::session {
namespace {

// Limit of an entry that is extended: one worker applies it, and it is read
// again as a whole when a part of it was overwritten.
constexpr uint64_t kPayloadBytesMax = 1 << 20;

}  // namespace

// Counts entries: one begins with each piece, after a full entry, and behind an
// omitted block, which takes more bytes than the entry.
uint64_t StagedLoad::BytesMax(const ElementAccess& elements,
                              const Layout& layout, uint64_t rank_count) {
  constexpr uint64_t kPageBytes = 4096;
  constexpr uint64_t kEntryBytes = sizeof(storage::LoadLogEntry) + 8;
  uint64_t bytes = 2 * kPageBytes;
  uint64_t arrays = 3;  // masters, counts and numbers
  const auto add = [&](v1::StateArray array, const ParameterSpec& spec) {
    bytes += elements.PayloadBytes(array, elements.ElementsOf(array, spec));
  };
  const size_t state_arrays = layout.optimizer_info().state_arrays.size();
  for (const ParameterSpec& spec : layout.parameters()) {
    add(v1::STATE_ARRAY_MASTER, spec);
    for (size_t k = 0; k < state_arrays; ++k) {
      add(static_cast<v1::StateArray>(v1::STATE_ARRAY_STATE_0 + k), spec);
    }
    bytes += sizeof(int64_t) + sizeof(double);
  }
  arrays += state_arrays;
  // The next block had no room in a full one.
  bytes +=
      bytes / (kPayloadBytesMax - ElementAccess::kBlockBytesMax) * kEntryBytes;
  bytes += (layout.parameters().size() + rank_count) * arrays * kEntryBytes;
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

void StagedLoad::Reset(const storage::LoadLogHeader& header) {
  header_ = header;
  begun_ = false;
  room_ = 0;
  records_.clear();
  last_ = records_.end();
  damaged_.clear();
  left_out_.clear();
}

// A record that was found damaged is not read again for each of its blocks.
absl::StatusOr<bool> StagedLoad::IsPresent(const ElementAccess& elements,
                                           const ElementRange& range,
                                           const float* values) {
  const size_t record = elements.RecordOf(range.parameter, range.begin);
  if (damaged_.count(record) > 0) return false;
  float present[ElementAccess::kBlockElements];
  const absl::Status read = elements.ReadFloats(range, present);
  if (absl::IsDataLoss(read)) {
    if (left_out_.count(record) > 0) return LeftOutOfDamaged(read);
    damaged_.insert(record);
    return false;
  }
  OPTSTATE_RETURN_IF_ERROR(read);
  return std::memcmp(present, values, range.numel * sizeof(float)) == 0;
}

// Present values have a payload too, for where the log already has other ones.
// The payload is read, not made, since encoding decoded values may give other
// codes.
absl::StatusOr<bool> StagedLoad::Compare(const ElementAccess& elements,
                                         const ElementRange& range,
                                         const float* values,
                                         std::byte* payload) {
  OPTSTATE_ASSIGN_OR_RETURN(const bool is_present,
                            IsPresent(elements, range, values));
  if (!is_present) {
    elements.MakePayload(range, values, payload);
  } else if (!empty()) {
    OPTSTATE_RETURN_IF_ERROR(elements.ReadPayload(range, payload));
  }
  return is_present;
}

absl::Status StagedLoad::StageNumber(const ElementAccess& elements,
                                     const ElementRange& range,
                                     const std::byte* value,
                                     const std::byte* present, Grow grow) {
  const bool is_present = std::memcmp(value, present, sizeof(int64_t)) == 0;
  return Put(elements, range, value, is_present, grow);
}

// Puts the range part by part: parts that the log has already are overwritten.
absl::Status StagedLoad::Put(const ElementAccess& elements,
                             const ElementRange& range,
                             const std::byte* payload, bool is_present,
                             Grow grow) {
  const uint64_t end = range.begin + range.numel;
  ElementRange part = range;
  while (part.begin < end) {
    const std::byte* const from =
        payload + elements.PayloadBytes(range.array, part.begin - range.begin);
    const auto next =
        records_.upper_bound({part.array, part.parameter, part.begin});
    const auto found = next == records_.begin() ? next : std::prev(next);
    if (found != records_.end() && found->first.IsOf(part) &&
        found->first.begin <= part.begin && found->second.end > part.begin) {
      part.numel = std::min(end, found->second.end) - part.begin;
      const uint64_t at =
          elements.PayloadBytes(part.array, part.begin - found->first.begin);
      std::memcpy(log_.payload(found->second.entry) + at, from,
                  elements.PayloadBytes(part.array, part.numel));
      found->second.has_checksum = false;
    } else {
      const bool is_before = next != records_.end() && next->first.IsOf(part);
      part.numel =
          (is_before ? std::min(end, next->first.begin) : end) - part.begin;
      if (!is_present) {
        OPTSTATE_RETURN_IF_ERROR(Append(elements, part, from, grow));
      } else if (!ElementAccess::IsPerParameter(part.array)) {
        left_out_.insert(elements.RecordOf(part.parameter, part.begin));
      }
    }
    part.begin += part.numel;
  }
  return absl::OkStatus();
}

absl::Status StagedLoad::Append(const ElementAccess& elements,
                                const ElementRange& range,
                                const std::byte* payload, Grow grow) {
  if (!begun_) {
    OPTSTATE_ASSIGN_OR_RETURN(const absl::Span<std::byte> file,
                              grow(sizeof(storage::LoadLogHeader)));
    log_.Begin(header_, file);
    room_ = file.size();
    begun_ = true;
  }
  const uint64_t bytes = elements.PayloadBytes(range.array, range.numel);
  if (last_ != records_.end() && last_->first.IsOf(range) &&
      last_->second.end == range.begin &&
      log_.entry(last_->second.entry).payload_bytes + bytes <=
          kPayloadBytesMax) {
    OPTSTATE_RETURN_IF_ERROR(Reserve(log_.BytesWithMore(bytes), grow));
    const uint64_t entry = last_->second.entry;
    std::memcpy(log_.payload(entry) + log_.entry(entry).payload_bytes, payload,
                bytes);
    log_.Extend(range.numel, bytes);
    last_->second.end += range.numel;
    last_->second.has_checksum = false;
  } else {
    OPTSTATE_RETURN_IF_ERROR(Reserve(log_.BytesWith(bytes), grow));
    if (last_ != records_.end()) {  // while it is in the caches
      log_.SetChecksum(last_->second.entry);
      last_->second.has_checksum = true;
    }
    const uint64_t entry =
        log_.Append({.array = static_cast<uint32_t>(range.array),
                     .parameter = range.parameter,
                     .begin = range.begin,
                     .numel = range.numel,
                     .payload_bytes = bytes});
    std::memcpy(log_.payload(entry), payload, bytes);
    const uint32_t parameter = ElementAccess::IsPerParameter(range.array)
                                   ? static_cast<uint32_t>(range.begin)
                                   : range.parameter;
    first_parameter_ =
        empty() ? parameter : std::min(first_parameter_, parameter);
    last_ = records_
                .emplace(Key{range.array, range.parameter, range.begin},
                         Record{.end = range.begin + range.numel,
                                .entry = entry,
                                .has_checksum = false})
                .first;
  }
  return absl::OkStatus();
}

absl::Status StagedLoad::Reserve(uint64_t bytes, Grow grow) {
  if (bytes <= room_) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(const absl::Span<std::byte> file, grow(bytes));
  log_.Move(file);
  room_ = file.size();
  return absl::OkStatus();
}

storage::LoadLogSeal StagedLoad::Seal() {
  for (auto& [key, record] : records_) {
    if (record.has_checksum) continue;
    log_.SetChecksum(record.entry);
    record.has_checksum = true;
  }
  return log_.Seal();
}

std::vector<storage::LoadLogRecord> StagedLoad::records() const {
  std::vector<storage::LoadLogRecord> records;
  records.reserve(records_.size());
  for (const auto& [key, record] : records_) {
    records.push_back({log_.entry(record.entry), log_.payload(record.entry)});
  }
  return records;
}

}  // namespace optstate::session
