#ifndef OPTSTATE_CLIENT_COLLECTIVE_SUM_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SUM_H_

#include <cstddef>

#include "absl/types/span.h"
#include "client/collective/element_type.h"

namespace optstate::client {

// Adds up arrays of `count` elements in the order of `arrays`: ((a0 + a1) + a2)
// + ... Each addition is rounded in the element's type; of bfloat16, additions
// are in float32 and the result is rounded once to nearest even; uint8 is
// modulo 256.
//
// `arrays`: at least one; each is aligned to the element. `out` is one of them
// or disjoint from all.
void SumInOrder(ElementType type, absl::Span<const std::byte* const> arrays,
                size_t count, std::byte* out);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SUM_H_
