#ifndef OPTSTATE_SERVER_OBSERVE_COUNTERS_H_
#define OPTSTATE_SERVER_OBSERVE_COUNTERS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

namespace optstate::observe {

// Things that happen in the supervisor and are only counted, for
// server/metrics. A count begins with the process: an upgrade in place begins
// it anew.
enum class Counted : size_t {
  kConnectionAccepted,
  kSessionHandedOver,  // to an engine
  kEngineStarted,
  kEngineAdopted,
  kEngineStopped,   // as it was told
  kEngineReplaced,  // as it was told, by the next engine of its job
  kEngineDied,
  kEngineKilled,  // by the supervisor, because it did not start or stop in time
  kLogLineLeftOut,
  kEnd
};

// The things that a status is the answer to.
enum class Answered : size_t {
  kSession,         // a connection that asked for a session, and was refused
  kGrpcConnection,  // a connection in gRPC that was refused
  kAdminCall,       // a call of the Admin service, also one that succeeded
  kEnd
};

// The codes of a status, of which absl has the numbers 0 to 16.
inline constexpr size_t kCodes = 17;

// Counts it. Threads: thread-safe, without a lock.
void Count(Counted what);
void Count(Answered what, absl::StatusCode code);

uint64_t CountOf(Counted what);
// `code` is below kCodes.
uint64_t CountOf(Answered what, absl::StatusCode code);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_COUNTERS_H_
