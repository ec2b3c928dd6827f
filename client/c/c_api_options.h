#ifndef OPTSTATE_CLIENT_C_C_API_OPTIONS_H_
#define OPTSTATE_CLIENT_C_C_API_OPTIONS_H_

#include "absl/status/statusor.h"
#include "client/c_api.h"
#include "client/session_types.h"

namespace optstate::client {

// Converts the caller's C structs to those of the C++ API and checks them.
// INVALID_ARGUMENT names the field.
absl::StatusOr<SessionOptions> ReadSessionOptions(
    const optstate_session_options* given);
absl::StatusOr<CommitOptions> ReadCommitOptions(
    const optstate_commit_options* given);
absl::StatusOr<ParameterTargets> ReadCommitTargets(
    const optstate_commit_options* given);

absl::StatusOr<StateArray> ReadStateArray(int32_t value);
absl::StatusOr<DType> ReadDType(int32_t value, const char* name);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_C_C_API_OPTIONS_H_
