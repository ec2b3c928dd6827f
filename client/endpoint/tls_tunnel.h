#ifndef OPTSTATE_CLIENT_ENDPOINT_TLS_TUNNEL_H_
#define OPTSTATE_CLIENT_ENDPOINT_TLS_TUNNEL_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/endpoint/endpoint.h"
#include "client/session_types.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// Makes a TLS connection of `socket`, which is connected to `endpoint`, and
// returns a socket (close-on-exec, blocking) of which the other end is the
// daemon: a thread of this process encrypts between the two.
//
// The environment says what to show and to believe: OPTSTATE_TLS_CA (the CAs of
// daemons' certificates; unset: the system's), OPTSTATE_TLS_CERTIFICATE and
// OPTSTATE_TLS_KEY (this client's), OPTSTATE_TLS_SERVER_NAME (the name that the
// daemon's certificate has to have; unset: the endpoint's host). All files are
// PEM, and are read anew for each connection.
//
// Errors name the endpoint. UNAUTHENTICATED: a certificate is refused, by
// either side, and the text says which and why; FAILED_PRECONDITION: no TLS is
// spoken there; INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED: a file;
// UNAVAILABLE: the connection was lost; DEADLINE_EXCEEDED; CANCELLED when
// interrupted.
//
// A forked child has no part in its parent's connections: its copies of these
// sockets are closed, but for the returned one, which is the caller's.
absl::StatusOr<UniqueFd> OpenTlsTunnel(UniqueFd socket,
                                       const Endpoint& endpoint,
                                       absl::Time deadline,
                                       const InterruptCheck& interrupted);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ENDPOINT_TLS_TUNNEL_H_
