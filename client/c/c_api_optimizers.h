#ifndef OPTSTATE_CLIENT_C_C_API_OPTIMIZERS_H_
#define OPTSTATE_CLIENT_C_C_API_OPTIMIZERS_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "client/c_api.h"

namespace optstate::client {

// Returns row `index` of the table in proto/types/optimizer.h as a C struct,
// whose pointers stay valid for the life of the process. OUT_OF_RANGE: `index`
// is behind the last row. Thread-safe.
absl::StatusOr<optstate_optimizer_info> OptimizerInfoAt(size_t index);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_C_C_API_OPTIMIZERS_H_
