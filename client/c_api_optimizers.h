#ifndef OPTSTATE_CLIENT_C_API_OPTIMIZERS_H_
#define OPTSTATE_CLIENT_C_API_OPTIMIZERS_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "client/c_api.h"

namespace optstate::client {

// Row `index` of proto/types/optimizer.h as C sees it; what it points to lives
// for ever. OUT_OF_RANGE behind the last. Thread-safe.
absl::StatusOr<optstate_optimizer_info> OptimizerInfoAt(size_t index);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_C_API_OPTIMIZERS_H_
