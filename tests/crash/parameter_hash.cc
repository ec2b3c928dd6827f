#include "tests/crash/parameter_hash.h"

#include <cstddef>
#include <vector>

#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"

namespace optstate::crash {

// Computes FNV-1a.
absl::StatusOr<uint64_t> HashOfParameters(client::Session& session) {
  uint64_t hash = 0xcbf29ce484222325;
  for (uint32_t i = 0; i < session.layout().parameters().size(); ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(const std::vector<std::byte> values,
                              ParameterOf(session, i));
    for (const std::byte byte : values) {
      hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
    }
  }
  return hash;
}

}  // namespace optstate::crash
