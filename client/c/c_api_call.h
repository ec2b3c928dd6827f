#ifndef OPTSTATE_CLIENT_C_C_API_CALL_H_
#define OPTSTATE_CLIENT_C_C_API_CALL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/c_api.h"
#include "client/client.h"

struct optstate_session {
  std::unique_ptr<optstate::client::Session> session;
  // The strings to which optstate_session_info points.
  std::string endpoint;
  std::string wire;
};

namespace optstate::client {

// Returns the text of the last error of a call by this thread.
const std::string& LastError();

// Runs one call of the API and lets no exception leave it. Returns the code of
// the call's status and keeps the text of an error for LastError().
int Guarded(absl::FunctionRef<absl::Status()> call);
// INVALID_ARGUMENT when the session is null.
int Guarded(optstate_session* session,
            absl::FunctionRef<absl::Status(Session&)> call);

// Returns INVALID_ARGUMENT when one of two arrays is null, unless both have no
// elements.
absl::Status CheckArrays(const void* a, const void* b, size_t count);

// Returns the values of a parameter; INVALID_ARGUMENT when the layout has no
// such parameter.
absl::StatusOr<absl::Span<const std::byte>> FindParameter(
    const Session& session, uint32_t parameter);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_C_C_API_CALL_H_
