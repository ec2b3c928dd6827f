#ifndef OPTSTATE_CLIENT_ENDPOINT_INTERRUPT_H_
#define OPTSTATE_CLIENT_ENDPOINT_INTERRUPT_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/session_types.h"

namespace optstate::client {

// The time between two checks for an interrupt during a wait. A check may cost
// a lock that another thread holds for milliseconds (Python's), so a wait that
// is shorter never checks.
inline constexpr absl::Duration kInterruptSlice = absl::Milliseconds(50);

// Returns CANCELLED when `interrupted` returns true.
absl::Status CheckInterrupted(const InterruptCheck& interrupted);

// Waits until `fd` can be read, its peer is gone, or `deadline` has passed; the
// caller's next read tells these apart. CANCELLED: interrupted.
absl::Status AwaitReadable(int fd, absl::Time deadline,
                           const InterruptCheck& interrupted);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ENDPOINT_INTERRUPT_H_
