#include "storage/block_device/superblock.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/format/sealed_header.h"

namespace optstate::storage {
namespace {

constexpr char kMagic[] = "SODEVIC1";
constexpr uint32_t kVersion = 1;
constexpr uint32_t kByteOrder = 0x01020304;
constexpr size_t kIdBytes = 16;

struct RawSuperblock {
  char magic[8];
  uint32_t version;
  uint32_t byte_order;
  char device_id[kIdBytes];
  char directory_id[kIdBytes];
  uint64_t device_bytes;
  uint64_t data_begin;
  uint64_t formatted_at_ns;
  char zeros[4020];
  uint32_t header_crc32c;
};
static_assert(sizeof(RawSuperblock) == kSuperblockBytes);

void PutId(const std::string& hex, char* id) {
  absl::HexStringToBytes(hex).copy(id, kIdBytes);
}

std::string TakeId(const char* id) {
  return absl::BytesToHexString(absl::string_view(id, kIdBytes));
}

}  // namespace

bool IsDeviceId(absl::string_view text) {
  return text.size() == 2 * kIdBytes &&
         std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
}

std::string NewDeviceId() {
  std::random_device random;
  std::string id;
  while (id.size() < 2 * kIdBytes) {
    absl::StrAppend(&id, absl::Hex(random(), absl::kZeroPad8));
  }
  return id;
}

std::string EncodeSuperblock(const Superblock& superblock) {
  RawSuperblock raw = {};
  std::memcpy(raw.magic, kMagic, sizeof(raw.magic));
  raw.version = kVersion;
  raw.byte_order = kByteOrder;
  PutId(superblock.device_id, raw.device_id);
  PutId(superblock.directory_id, raw.directory_id);
  raw.device_bytes = superblock.device_bytes;
  raw.data_begin = kDeviceHeadBytes;
  raw.formatted_at_ns = superblock.formatted_at_ns;
  Seal(&raw);
  return {reinterpret_cast<const char*>(&raw), sizeof(raw)};
}

absl::StatusOr<Superblock> DecodeSuperblock(absl::string_view bytes) {
  RawSuperblock raw = {};
  std::memcpy(&raw, bytes.data(), std::min(bytes.size(), sizeof(raw)));
  if (std::memcmp(raw.magic, kMagic, sizeof(raw.magic)) != 0) {
    return absl::NotFoundError("it was never formatted for optstate");
  }
  if (raw.version != kVersion || raw.byte_order != kByteOrder) {
    return absl::FailedPreconditionError(absl::StrCat(
        "its superblock has version ", raw.version, " and byte order ",
        absl::Hex(raw.byte_order), ", this build knows ", kVersion, " and ",
        absl::Hex(kByteOrder)));
  }
  if (!IsSealed(raw) || raw.data_begin != kDeviceHeadBytes) {
    return absl::DataLossError(
        "its superblock is damaged: its checksum differs");
  }
  return Superblock{.device_id = TakeId(raw.device_id),
                    .directory_id = TakeId(raw.directory_id),
                    .device_bytes = raw.device_bytes,
                    .formatted_at_ns = raw.formatted_at_ns};
}

}  // namespace optstate::storage
