#ifndef OPTSTATE_CLIENT_C_C_API_STRUCTS_H_
#define OPTSTATE_CLIENT_C_C_API_STRUCTS_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace optstate::client {

// Bytes of a C API struct up to and including `field`: the size known to a
// caller that was compiled against the oldest version of the struct.
#define OPTSTATE_SIZE_THROUGH(type, field) \
  (offsetof(type, field) + sizeof(type::field))

template <typename T>
absl::Status CheckStruct(const T* given, size_t size_min,
                         absl::string_view name) {
  if (given == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is NULL"));
  }
  if (given->struct_size >= size_min) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ".struct_size is ", given->struct_size,
                   "; it is set to the struct's size, at least ", size_min));
}

// Copies a caller's struct into the version of the struct that this library
// knows. Fields that the caller's version lacks are 0.
template <typename T>
absl::StatusOr<T> ReadStruct(const T* given, size_t size_min,
                             absl::string_view name) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (absl::Status status = CheckStruct(given, size_min, name); !status.ok()) {
    return status;
  }
  T known;
  std::memset(&known, 0, sizeof(known));
  std::memcpy(&known, given, std::min(given->struct_size, sizeof(T)));
  return known;
}

// Reads element `index` of a caller's array, whose stride is the caller's
// struct size.
template <typename T>
absl::StatusOr<T> ReadElement(const T* array, size_t index, size_t size_min,
                              absl::string_view name) {
  if (absl::Status status = CheckStruct(array, size_min, name); !status.ok()) {
    return status;
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(array);
  return ReadStruct(
      reinterpret_cast<const T*>(bytes + index * array->struct_size), size_min,
      name);
}

// Fills the caller's struct as far as the caller's version goes. The struct was
// checked before.
template <typename T>
void WriteStruct(T value, size_t struct_size, void* to) {
  static_assert(std::is_trivially_copyable_v<T>);
  value.struct_size = struct_size;
  std::memcpy(to, &value, std::min(struct_size, sizeof(T)));
}

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_C_C_API_STRUCTS_H_
