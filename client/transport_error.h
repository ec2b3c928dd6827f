#ifndef OPTSTATE_CLIENT_TRANSPORT_ERROR_H_
#define OPTSTATE_CLIENT_TRANSPORT_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace optstate::client {

// A transport error says that the daemon was not reached or went away; any
// other is its answer. The first is worth another try, the second is not, and
// the code alone does not tell them apart: UNAVAILABLE is both a refused
// connection and a daemon that drains.
inline constexpr char kTransportErrorUrl[] = "optstate/transport";

inline absl::Status TransportError(absl::Status status) {
  if (!status.ok()) status.SetPayload(kTransportErrorUrl, absl::Cord());
  return status;
}

inline absl::Status NotConnected() {
  return TransportError(absl::UnavailableError("not connected"));
}

// At the deadline of a call; an answer that says why would come by then only if
// the other ranks had.
inline absl::Status NoAnswer() {
  return absl::DeadlineExceededError(
      "no answer from the engine in time: it may be waiting for other ranks "
      "(`optctl describe job` says for which), or be stopped");
}

// A transport error of which nobody was there to hear.
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

#endif  // OPTSTATE_CLIENT_TRANSPORT_ERROR_H_
