#include "server/observe/log_text.h"

#include <cstdint>

#include "absl/strings/str_cat.h"

namespace optstate::observe {
namespace {

void AppendByte(char byte, std::string* out) {
  switch (byte) {
    case '\n':
      out->append("\\n");
      break;
    case '\r':
      out->append("\\r");
      break;
    case '\t':
      out->append("\\t");
      break;
    default:
      absl::StrAppend(
          out, "\\x",
          absl::Hex(static_cast<uint8_t>(byte), absl::PadSpec::kZeroPad2));
  }
}

}  // namespace

size_t DecodeCharacter(absl::string_view text, uint32_t* code) {
  const auto byte = [text](size_t i) {
    return static_cast<uint8_t>(i < text.size() ? text[i] : 0);
  };
  if (text.empty()) return 0;
  const uint8_t first = byte(0);
  *code = first;
  if (first < 0x80) return 1;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4) return 0;
  *code = first & (0xffu >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    *code = *code << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool valid = *code >= kLeast[size] && *code <= 0x10ffff &&
                     !(*code >= 0xd800 && *code <= 0xdfff);
  return valid ? size : 0;
}

bool IsControl(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 ||
         code == 0x2029;
}

std::string LogText(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    if (out.size() >= kLineBytesMax) {
      absl::StrAppend(&out, "... (", text.size(), " bytes more)");
      break;
    }
    uint32_t code = 0;
    const size_t decoded = DecodeCharacter(text, &code);
    const size_t size = IsControl(code) ? 0 : decoded;
    if (size == 0) {
      AppendByte(text[0], &out);
    } else {
      out.append(text.data(), size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  return out;
}

}  // namespace optstate::observe
