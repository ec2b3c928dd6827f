#ifndef OPTSTATE_PROTO_TYPES_ACCUMULATION_H_
#define OPTSTATE_PROTO_TYPES_ACCUMULATION_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"

namespace optstate {

// The dtype in which a job keeps the sums of its micro-steps. Values equal
// those of optstate.v1.AccumulateDType.
enum class AccumulateDType : uint8_t {
  kFloat32 = 1,
  // The dtype of the parameter's gradients: each addition is made in float and
  // rounded to nearest even.
  kGradient = 2,
};

constexpr bool IsValidAccumulateDType(uint32_t value) {
  return value == 1 || value == 2;
}

absl::string_view Name(AccumulateDType dtype);

// The accumulation of a job; none: micro-steps are not summed.
using Accumulation = std::optional<AccumulateDType>;

// Returns, for kGradient, the byte offsets of each parameter's sums in their
// file, and the file's size as the last number. Offsets stay when the layout is
// extended.
std::vector<uint64_t> GradientSumOffsets(const Layout& layout);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_ACCUMULATION_H_
