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

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_DTYPE_H_
