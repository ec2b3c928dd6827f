#include "proto/types/accumulation.h"

namespace optstate {

absl::string_view Name(AccumulateDType dtype) {
  return dtype == AccumulateDType::kGradient ? "gradient" : "float32";
}

std::vector<uint64_t> GradientSumOffsets(const Layout& layout) {
  constexpr uint64_t kAlignBytes = 64;  // so that no two share a cache line
  std::vector<uint64_t> offsets = {0};
  offsets.reserve(layout.parameters().size() + 1);
  for (const ParameterSpec& spec : layout.parameters()) {
    const uint64_t bytes =
        static_cast<uint64_t>(spec.numel) * SizeInBytes(spec.gradient_dtype);
    offsets.push_back(offsets.back() +
                      (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes);
  }
  return offsets;
}

}  // namespace optstate
