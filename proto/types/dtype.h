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

// The location of the fp32 value of a parameter that updates work on. The first
// two are a job's choice, with values that equal optstate.v1.MasterFormat.
enum class MasterFormat : uint8_t {
  // An array of floats beside the parameters, which are rounded copies of it.
  kFloat32 = 1,
  // The upper half is the bfloat16 parameter, the lower 16 bits are beside it:
  //   parameter = (bits + 0x8000) >> 16, low = bits & 0xFFFF
  // so a parameter half way between two bfloat16 is the one of larger
  // magnitude, where kFloat32 rounds to even: no 32 bits could hold both.
  kSplit = 2,
  // The float32 parameter is its own master.
  kParameter = 3,
};

constexpr bool IsValidMasterFormat(uint32_t value) {
  return value == 1 || value == 2;
}

// The size in bytes of a master element beside the parameter.
constexpr size_t SizeInBytes(MasterFormat format) {
  switch (format) {
    case MasterFormat::kFloat32:
      return 4;
    case MasterFormat::kSplit:
      return 2;
    case MasterFormat::kParameter:
      return 0;
  }
  return 0;
}

constexpr absl::string_view Name(MasterFormat format) {
  switch (format) {
    case MasterFormat::kFloat32:
      return "float32";
    case MasterFormat::kSplit:
      return "split";
    case MasterFormat::kParameter:
      return "parameter";
  }
  return "invalid";
}

// The format of the elements of a job's state arrays. Values equal
// optstate.v1.StateFormat.
enum class StateFormat : uint8_t {
  kFloat32 = 1,
  // Rounded stochastically, with random bits that depend only on the step, the
  // array and the element.
  kBFloat16 = 2,
  // One byte per element: an index into bitsandbytes' dynamic map, times the
  // largest value of the element's block of kQuantizedBlockElements.
  kDynamic8 = 3,
};

// The number of elements that share a scale, counted from the beginning of the
// parameter.
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
