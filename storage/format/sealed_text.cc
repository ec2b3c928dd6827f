#include "storage/format/sealed_text.h"

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "storage/format/checksum.h"

namespace optstate::storage {
namespace {

constexpr int kSealBits = 32;
// A person's editor may leave a line's end more, or "\r\n"; a seal is longer.
constexpr size_t kPlainSpaceMax = 2;

absl::string_view WithoutSpace(absl::string_view text) {
  return absl::StripTrailingAsciiWhitespace(text);
}

}  // namespace

std::string SealText(absl::string_view text) {
  const uint32_t checksum = Crc32c(text.data(), text.size());
  std::string sealed(text);
  for (int bit = kSealBits - 1; bit >= 0; --bit) {
    sealed += (checksum >> bit & 1) != 0 ? '\n' : ' ';
  }
  return sealed;
}

bool IsSealed(absl::string_view text) {
  return text == SealText(absl::StrCat(WithoutSpace(text), "\n"));
}

absl::StatusOr<absl::string_view> UnsealText(absl::string_view text) {
  const size_t end = WithoutSpace(text).size();
  if (text.size() - end <= kPlainSpaceMax) return text;
  if (IsSealed(text)) return text.substr(0, end + 1);
  return absl::DataLossError(
      "its checksum, the white space at its end, is not that of its text");
}

}  // namespace optstate::storage
