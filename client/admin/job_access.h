#ifndef OPTSTATE_CLIENT_ADMIN_JOB_ACCESS_H_
#define OPTSTATE_CLIENT_ADMIN_JOB_ACCESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session_types.h"

namespace optstate::client {

// Asks a daemon who may use a job. UNIMPLEMENTED: the daemon is of a build
// that takes no notice of it, so that everybody may look at the job; other
// errors are those of AdminConnection::Await(), and NOT_FOUND.
absl::StatusOr<AccessOptions> AskJobAccess(const std::string& endpoint,
                                           const std::string& job,
                                           absl::Duration timeout,
                                           const InterruptCheck& interrupted);

// Returns "private; group research; readers alice, @ops", or "not private".
std::string AccessText(const AccessOptions& access);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ADMIN_JOB_ACCESS_H_
