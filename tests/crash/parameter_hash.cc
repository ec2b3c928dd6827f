#include "tests/crash/parameter_hash.h"

#include <cstddef>

namespace optstate::crash {

// Computes FNV-1a.
uint64_t HashOfParameters(const client::Session& session) {
  uint64_t hash = 0xcbf29ce484222325;
  for (uint32_t i = 0; i < session.layout().parameters().size(); ++i) {
    for (const std::byte byte : session.parameter(i)) {
      hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
    }
  }
  return hash;
}

}  // namespace optstate::crash
