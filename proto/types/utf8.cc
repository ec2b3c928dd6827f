#include "proto/types/utf8.h"

#include <cstdint>

namespace optstate {
namespace {

// The properties of a character that begins with a given byte: the number of
// bytes that follow, and the range of the first of them. follow is -1 when no
// character begins with the byte.
struct Lead {
  int follow = -1;
  uint8_t second_min = 0x80;
  uint8_t second_max = 0xbf;
};

Lead LeadOf(uint8_t byte) {
  if (byte < 0x80) return {.follow = 0};
  if (byte < 0xc2) return {};
  if (byte < 0xe0) return {.follow = 1};
  if (byte == 0xe0) return {.follow = 2, .second_min = 0xa0};
  if (byte == 0xed) return {.follow = 2, .second_max = 0x9f};
  if (byte < 0xf0) return {.follow = 2};
  if (byte == 0xf0) return {.follow = 3, .second_min = 0x90};
  if (byte < 0xf4) return {.follow = 3};
  if (byte == 0xf4) return {.follow = 3, .second_max = 0x8f};
  return {};
}

}  // namespace

bool IsUtf8(absl::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Lead lead = LeadOf(static_cast<uint8_t>(text[at++]));
    if (lead.follow < 0) return false;
    for (int i = 0; i < lead.follow; ++i, ++at) {
      if (at == text.size()) return false;
      const auto byte = static_cast<uint8_t>(text[at]);
      const uint8_t min = i == 0 ? lead.second_min : 0x80;
      const uint8_t max = i == 0 ? lead.second_max : 0xbf;
      if (byte < min || byte > max) return false;
    }
  }
  return true;
}

}  // namespace optstate
