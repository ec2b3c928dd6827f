#ifndef OPTSTATE_TESTS_FUZZ_FUZZ_INPUT_H_
#define OPTSTATE_TESTS_FUZZ_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace optstate::fuzz {

// Takes an input apart, from its begin. What is missing at the end reads as
// zeros, so that every input has a meaning.
//
// Threads: not thread-safe.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size)
      : rest_(reinterpret_cast<const char*>(data), size) {}

  template <typename T>
  T Take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value = {};
    const absl::string_view bytes = TakeBytes(sizeof(T));
    // The input may be over, and its data null then, which memcpy refuses.
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(&value));
    return value;
  }
  // Takes at most `size` bytes.
  absl::string_view TakeBytes(size_t size) {
    const absl::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  // Takes a string that begins with its length in two bytes.
  absl::string_view TakeString() { return TakeBytes(Take<uint16_t>()); }

  absl::string_view rest() const { return rest_; }
  bool empty() const { return rest_.empty(); }

 private:
  absl::string_view rest_;
};

// Returns what TakeString() reads; the text has fewer than 2^16 bytes.
inline std::string FuzzString(absl::string_view text) {
  const auto size = static_cast<uint16_t>(text.size());
  std::string bytes(sizeof(size), '\0');
  std::memcpy(bytes.data(), &size, sizeof(size));
  bytes.append(text.data(), size);
  return bytes;
}

// Returns the bytes of a value, as Take() reads them.
template <typename T>
std::string FuzzBytes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

}  // namespace optstate::fuzz

#endif  // OPTSTATE_TESTS_FUZZ_FUZZ_INPUT_H_
