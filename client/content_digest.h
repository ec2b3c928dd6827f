#ifndef OPTSTATE_CLIENT_CONTENT_DIGEST_H_
#define OPTSTATE_CLIENT_CONTENT_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace optstate::client {

// XXH3 (Collet, 64 bits): other data, or another seed, give another value but
// for one in 2^64.
uint64_t ContentDigest(absl::Span<const std::byte> data, uint64_t seed);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CONTENT_DIGEST_H_
