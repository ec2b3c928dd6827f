#ifndef OPTSTATE_CLIENT_SESSION_CONTENT_DIGEST_H_
#define OPTSTATE_CLIENT_SESSION_CONTENT_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace optstate::client {

// Returns the XXH3 hash (Collet, 64 bits) of the data. Different data, or
// another seed, give the same value with probability 2^-64.
uint64_t ContentDigest(absl::Span<const std::byte> data, uint64_t seed);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_SESSION_CONTENT_DIGEST_H_
