#include "storage/format/load_log.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/status_macros.h"
#include "storage/format/checksum.h"

namespace optstate::storage {
namespace {

constexpr uint64_t kAlignment = 8;

uint64_t Aligned(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The checksum of the header, then of each entry together with the checksum
// before it.
class Chain {
 public:
  explicit Chain(const LoadLogHeader& header)
      : crc32c_(Crc32c(&header, sizeof(header))) {}
  void Add(const LoadLogEntry& entry) {
    const struct {
      LoadLogEntry entry;
      uint64_t before;
    } link = {entry, crc32c_};
    crc32c_ = Crc32c(&link, sizeof(link));
  }
  uint32_t crc32c() const { return crc32c_; }

 private:
  uint32_t crc32c_;
};

template <typename T>
T CopyOf(const std::byte* data) {
  T copy;
  std::memcpy(&copy, data, sizeof(copy));
  return copy;
}

absl::Status CheckHeader(const LoadLogHeader& found,
                         const LoadLogHeader& expected) {
  if (found.magic != kLoadLogMagic || found.version != kLoadLogVersion) {
    return absl::DataLossError(absl::StrFormat(
        "magic and version are %016x and %d, expected %016x and %d",
        found.magic, found.version, kLoadLogMagic, kLoadLogVersion));
  }
  if (found.incarnation == expected.incarnation &&
      found.committed_step == expected.committed_step &&
      found.loads_finished == expected.loads_finished) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrFormat(
      "it is of incarnation %016x, step %d, after %d loads; expected %016x, "
      "%d, %d",
      found.incarnation, found.committed_step, found.loads_finished,
      expected.incarnation, expected.committed_step, expected.loads_finished));
}

}  // namespace

void LoadLogWriter::Begin(const LoadLogHeader& header,
                          absl::Span<std::byte> file) {
  file_ = file;
  std::memcpy(file_.data(), &header, sizeof(header));
  bytes_ = sizeof(header);
  last_ = 0;
}

uint64_t LoadLogWriter::BytesWith(uint64_t payload_bytes) const {
  return Aligned(bytes_) + sizeof(LoadLogEntry) + payload_bytes;
}

uint64_t LoadLogWriter::Append(const LoadLogEntry& entry) {
  last_ = Aligned(bytes_);
  bytes_ = BytesWith(entry.payload_bytes);
  std::memcpy(file_.data() + last_, &entry, sizeof(entry));
  return last_;
}

void LoadLogWriter::Extend(uint64_t numel, uint64_t payload_bytes) {
  LoadLogEntry& last = entry(last_);
  last.numel += numel;
  last.payload_bytes += payload_bytes;
  bytes_ += payload_bytes;
}

LoadLogEntry& LoadLogWriter::entry(uint64_t offset) const {
  return *reinterpret_cast<LoadLogEntry*>(file_.data() + offset);
}

std::byte* LoadLogWriter::payload(uint64_t offset) const {
  return file_.data() + offset + sizeof(LoadLogEntry);
}

void LoadLogWriter::SetChecksum(uint64_t offset) const {
  LoadLogEntry& of = entry(offset);
  of.payload_crc32c = Crc32c(payload(offset), of.payload_bytes);
}

LoadLogSeal LoadLogWriter::Seal() const {
  Chain chain(CopyOf<LoadLogHeader>(file_.data()));
  uint64_t offset = sizeof(LoadLogHeader);
  while (offset < bytes_) {
    const auto of = CopyOf<LoadLogEntry>(file_.data() + offset);
    chain.Add(of);
    offset = Aligned(offset + sizeof(of) + of.payload_bytes);
  }
  return {.bytes = bytes_, .crc32c = chain.crc32c()};
}

absl::StatusOr<std::vector<LoadLogRecord>> ReadLoadLog(
    absl::Span<const std::byte> file, const LoadLogHeader& expected,
    const LoadLogSeal& seal) {
  if (file.size() < seal.bytes || seal.bytes < sizeof(LoadLogHeader)) {
    return absl::DataLossError(
        absl::StrCat("it has ", file.size(), " bytes, expected ", seal.bytes));
  }
  const auto header = CopyOf<LoadLogHeader>(file.data());
  OPTSTATE_RETURN_IF_ERROR(CheckHeader(header, expected));
  Chain chain(header);
  std::vector<LoadLogRecord> records;
  uint64_t offset = sizeof(header);
  while (offset < seal.bytes) {
    LoadLogRecord record;
    const uint64_t left = seal.bytes - offset;
    if (left >= sizeof(record.entry)) {
      record.entry = CopyOf<LoadLogEntry>(file.data() + offset);
    }
    if (left < sizeof(record.entry) ||
        record.entry.payload_bytes > left - sizeof(record.entry)) {
      return absl::DataLossError(
          absl::StrCat("the entry at byte ", offset, " does not fit into it"));
    }
    chain.Add(record.entry);
    record.payload = file.data() + offset + sizeof(record.entry);
    records.push_back(record);
    offset =
        Aligned(offset + sizeof(record.entry) + record.entry.payload_bytes);
  }
  if (chain.crc32c() != seal.crc32c) {
    return absl::DataLossError("the checksum of its entries is wrong");
  }
  for (const LoadLogRecord& record : records) {
    if (Crc32c(record.payload, record.entry.payload_bytes) ==
        record.entry.payload_crc32c) {
      continue;
    }
    return absl::DataLossError(
        absl::StrCat("the checksum of what begins at byte ",
                     record.payload - file.data(), " is wrong"));
  }
  return records;
}

}  // namespace optstate::storage
