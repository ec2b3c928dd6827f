#ifndef OPTSTATE_TESTS_CRASH_PARAMETER_HASH_H_
#define OPTSTATE_TESTS_CRASH_PARAMETER_HASH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace optstate::crash {

// Returns the hash of all parameters as the session shows or fetches them.
absl::StatusOr<uint64_t> HashOfParameters(client::Session& session);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_PARAMETER_HASH_H_
