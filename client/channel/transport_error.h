#ifndef OPTSTATE_CLIENT_CHANNEL_TRANSPORT_ERROR_H_
#define OPTSTATE_CLIENT_CHANNEL_TRANSPORT_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace optstate::client {

// The mark of a transport error: the daemon was not reached or went away; any
// other error is the daemon's answer. Only a transport error is worth another
// try, and the code alone does not tell the two apart: UNAVAILABLE is both a
// refused connection and a daemon that drains.
inline constexpr char kTransportErrorUrl[] = "optstate/transport";

inline absl::Status TransportError(absl::Status status) {
  if (!status.ok()) status.SetPayload(kTransportErrorUrl, absl::Cord());
  return status;
}

inline absl::Status NotConnectedError() {
  return TransportError(absl::UnavailableError("not connected"));
}

// The error at the deadline of a call; an answer with the reason would have
// come by then only if the other ranks had.
inline absl::Status NoAnswerError() {
  return absl::DeadlineExceededError(
      "no answer from the engine in time: it may be waiting for other ranks "
      "(`optctl describe job` says for which), or be stopped");
}

// Makes a transport error for a daemon that was not there to receive the
// request.
inline absl::Status UnreachableError(absl::Status status) {
  if (!status.ok()) {
    status.SetPayload(kTransportErrorUrl, absl::Cord("unreachable"));
  }
  return status;
}

inline bool IsTransportError(const absl::Status& status) {
  return status.GetPayload(kTransportErrorUrl).has_value();
}

inline bool IsUnreachable(const absl::Status& status) {
  return status.GetPayload(kTransportErrorUrl) == absl::Cord("unreachable");
}

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_TRANSPORT_ERROR_H_
