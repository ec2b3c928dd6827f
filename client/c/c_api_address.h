#ifndef OPTSTATE_CLIENT_C_C_API_ADDRESS_H_
#define OPTSTATE_CLIENT_C_C_API_ADDRESS_H_

#include "absl/status/statusor.h"
#include "client/c_api_nodes.h"
#include "client/session/job_position.h"

namespace optstate::client {

// Converts the caller's address of a job and checks it. INVALID_ARGUMENT names
// the field.
absl::StatusOr<JobAddress> ReadJobAddress(const optstate_job_address* address);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_C_C_API_ADDRESS_H_
