#include "client/session/content_digest.h"

// XXH is compiled here, so that no shared object is needed at run time.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace optstate::client {

uint64_t ContentDigest(absl::Span<const std::byte> data, uint64_t seed) {
  return XXH3_64bits_withSeed(data.data(), data.size(), seed);
}

}  // namespace optstate::client
