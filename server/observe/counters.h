#ifndef OPTSTATE_SERVER_OBSERVE_COUNTERS_H_
#define OPTSTATE_SERVER_OBSERVE_COUNTERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

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

// Queues of the supervisor, for server/metrics too.
enum class Queue : size_t {
  kHandshake,  // connections that have not said yet what they want
  kEngine,     // connections that wait for their job's engine
  kRemoval,    // removals of deleted jobs' files, with the one under way
  kEnd
};

// The codes of a status, of which absl has the numbers 0 to 16.
inline constexpr size_t kCodes = 17;

// Returns the number of a code, below kCodes; that of UNKNOWN for one that absl
// does not know, which comes from a peer's library.
inline size_t NumberOf(absl::StatusCode code) {
  const auto number = static_cast<size_t>(code);
  return number < kCodes ? number
                         : static_cast<size_t>(absl::StatusCode::kUnknown);
}

// Counts it. Threads: thread-safe, without a lock.
void Count(Counted what);
void Count(Answered what, absl::StatusCode code);

// Something that waits in a queue as long as this, or what it is moved to,
// lives.
//
// Threads: any one.
class InQueue {
 public:
  explicit InQueue(Queue queue);
  InQueue(InQueue&& other) noexcept : queue_(std::exchange(other.queue_, {})) {}
  InQueue& operator=(InQueue&& other) noexcept {
    std::swap(queue_, other.queue_);
    return *this;
  }
  ~InQueue();

 private:
  std::optional<Queue> queue_;  // unset: moved from
};

uint64_t CountOf(Counted what);
// `code` is below kCodes.
uint64_t CountOf(Answered what, absl::StatusCode code);
uint64_t LengthOf(Queue queue);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_COUNTERS_H_
