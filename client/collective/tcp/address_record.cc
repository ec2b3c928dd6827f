#include "client/collective/tcp/address_record.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace optstate::client {
namespace {

constexpr absl::string_view kForm = "optstate-tcp-1";
constexpr size_t kHostBytesMax = 255;
constexpr std::array<uint8_t, 8> kMagic = {'O', 'S', 'T', 'C',
                                           'O', 'L', 'L', '1'};
constexpr size_t kSecretOffset = kMagic.size();
constexpr size_t kRankOffset = 24;
constexpr size_t kWorldSizeOffset = 28;

std::string Hex(const AddressRecord::Secret& secret) {
  return absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(secret.data()), secret.size()));
}

bool ParseSecret(absl::string_view hex, AddressRecord::Secret* secret) {
  const auto is_hex = [](char each) {
    return absl::ascii_isxdigit(static_cast<unsigned char>(each));
  };
  if (hex.size() != 2 * secret->size() ||
      !std::all_of(hex.begin(), hex.end(), is_hex)) {
    return false;
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  std::copy(bytes.begin(), bytes.end(), secret->begin());
  return true;
}

bool ParseRecord(absl::string_view text, AddressRecord* record) {
  const std::vector<absl::string_view> fields = absl::StrSplit(text, ' ');
  uint32_t port = 0;
  if (fields.size() != 6 || fields[0] != kForm ||
      !absl::SimpleAtoi(fields[1], &record->world_size) ||
      !absl::SimpleAtoi(fields[2], &port) || port == 0 || port > 65535 ||
      !ParseSecret(fields[3], &record->knock) ||
      !ParseSecret(fields[4], &record->answer) || fields[5].empty() ||
      fields[5].size() > kHostBytesMax) {
    return false;
  }
  record->port = static_cast<uint16_t>(port);
  record->host = std::string(fields[5]);
  return true;
}

void PutNumber(uint32_t value, size_t offset, Greeting::Bytes* bytes) {
  for (size_t i = 0; i < sizeof(value); ++i) {
    (*bytes)[offset + i] = static_cast<uint8_t>(value >> (8 * i));
  }
}

uint32_t TakeNumber(const Greeting::Bytes& bytes, size_t offset) {
  uint32_t value = 0;
  for (size_t i = 0; i < sizeof(value); ++i) {
    value |= static_cast<uint32_t>(bytes[offset + i]) << (8 * i);
  }
  return value;
}

}  // namespace

std::string AddressRecord::ToString() const {
  return absl::StrCat(kForm, " ", world_size, " ", port, " ", Hex(knock), " ",
                      Hex(answer), " ", host);
}

absl::StatusOr<AddressRecord> ParseAddressRecord(absl::string_view text) {
  AddressRecord record;
  if (ParseRecord(text, &record)) return record;
  return absl::DataLossError(
      "no rank of this build has written this: give the run a fresh name, and "
      "all ranks the same build");
}

Greeting::Bytes Encode(const Greeting& greeting) {
  Greeting::Bytes bytes = {};
  std::copy(kMagic.begin(), kMagic.end(), bytes.begin());
  std::copy(greeting.secret.begin(), greeting.secret.end(),
            bytes.begin() + kSecretOffset);
  PutNumber(greeting.rank, kRankOffset, &bytes);
  PutNumber(greeting.world_size, kWorldSizeOffset, &bytes);
  return bytes;
}

absl::StatusOr<Greeting> DecodeGreeting(const Greeting::Bytes& bytes) {
  if (!std::equal(kMagic.begin(), kMagic.end(), bytes.begin())) {
    return absl::DataLossError("bytes that are no greeting");
  }
  Greeting greeting;
  std::copy_n(bytes.begin() + kSecretOffset, greeting.secret.size(),
              greeting.secret.begin());
  greeting.rank = TakeNumber(bytes, kRankOffset);
  greeting.world_size = TakeNumber(bytes, kWorldSizeOffset);
  return greeting;
}

bool AreEqual(const AddressRecord::Secret& a, const AddressRecord::Secret& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace optstate::client
