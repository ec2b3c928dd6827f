#ifndef OPTSTATE_PROTO_TYPES_DTYPE_H_
#define OPTSTATE_PROTO_TYPES_DTYPE_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate {

// Element types of gradients, parameters and state arrays. The values are part
// of the wire and file formats and equal those of optstate.v1.DType.
enum class DType : uint8_t {
  kFloat32 = 1,
  kBFloat16 = 2,
  kFloat16 = 3,
};

// True for the three values above; a byte from a peer or a file is checked
// with this before it is cast.
constexpr bool IsValidDType(uint32_t value) { return value >= 1 && value <= 3; }

constexpr size_t SizeInBytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

// torch's names without "torch.": "float32", "bfloat16", "float16".
constexpr absl::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "invalid";
}

// How the elements of a job's state arrays are kept. Values equal
// optstate.v1.StateFormat.
enum class StateFormat : uint8_t {
  kFloat32 = 1,
  // Rounded stochastically, with random bits that only depend on the step, the
  // array and the element.
  kBFloat16 = 2,
  // A byte each, a place in bitsandbytes' dynamic map, times the largest of its
  // block of kQuantizedBlockElements.
  kDynamic8 = 3,
};

// Elements that share a scale, counted from the beginning of the parameter.
inline constexpr size_t kQuantizedBlockElements = 256;

constexpr bool IsValidStateFormat(uint32_t value) {
  return value >= 1 && value <= 3;
}

constexpr size_t SizeInBytes(StateFormat format) {
  switch (format) {
    case StateFormat::kFloat32:
      return 4;
    case StateFormat::kBFloat16:
      return 2;
    case StateFormat::kDynamic8:
      return 1;
  }
  return 0;
}

constexpr absl::string_view Name(StateFormat format) {
  switch (format) {
    case StateFormat::kFloat32:
      return "float32";
    case StateFormat::kBFloat16:
      return "bfloat16";
    case StateFormat::kDynamic8:
      return "dynamic8";
  }
  return "invalid";
}

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_DTYPE_H_
