#ifndef OPTSTATE_CLIENT_ADMIN_SLEEP_CALL_H_
#define OPTSTATE_CLIENT_ADMIN_SLEEP_CALL_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/admin/admin_connection.h"
#include "client/session_types.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::client {

using OnSleepProgress = absl::FunctionRef<void(const v1::SleepProgress&)>;

// Call Admin.SleepJob and Admin.WakeJob once. They pass each message to
// `progress` until the job is asleep, or awake; the last one is `done`. A
// silence is bounded by the connection's timeout, the whole by `deadline`.
//
// CANCELLED: interrupted, and DEADLINE_EXCEEDED: the daemon goes on. Other
// errors are those of AdminConnection::Await() and the daemon's, see
// admin.proto; they name the endpoint.
absl::Status CallSleepJob(AdminConnection* connection, const std::string& job,
                          const InterruptCheck& interrupted,
                          OnSleepProgress progress,
                          absl::Time deadline = absl::InfiniteFuture());
absl::Status CallWakeJob(AdminConnection* connection, const std::string& job,
                         const InterruptCheck& interrupted,
                         OnSleepProgress progress,
                         absl::Time deadline = absl::InfiniteFuture());

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ADMIN_SLEEP_CALL_H_
