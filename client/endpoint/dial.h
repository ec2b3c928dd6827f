#ifndef OPTSTATE_CLIENT_ENDPOINT_DIAL_H_
#define OPTSTATE_CLIENT_ENDPOINT_DIAL_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/endpoint/endpoint.h"
#include "client/session_types.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// Connects a stream socket (close-on-exec, blocking) to an endpoint other than
// embedded. The error names the call and the address: NOT_FOUND when the
// socket's path or the host does not exist, UNAVAILABLE when nothing listens,
// PERMISSION_DENIED, DEADLINE_EXCEEDED, CANCELLED when interrupted. With TLS
// the socket leads to the daemon by way of a thread; further errors are those
// of OpenTlsTunnel().
//
// The lookup of a host name may outlast the deadline and cannot be interrupted:
// getaddrinfo supports neither.
absl::StatusOr<UniqueFd> Dial(const Endpoint& endpoint, absl::Time deadline,
                              const InterruptCheck& interrupted = nullptr);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ENDPOINT_DIAL_H_
