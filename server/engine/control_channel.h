#ifndef OPTSTATE_SERVER_ENGINE_CONTROL_CHANNEL_H_
#define OPTSTATE_SERVER_ENGINE_CONTROL_CHANNEL_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate {

// A connection that the supervisor accepted for this job.
struct AdoptedConnection {
  v1::AdoptConnection message;
  UniqueFd socket;
};

// The engine's end of the control socket pair.
//
// Threads: one at a time.
class ControlChannel {
 public:
  explicit ControlChannel(UniqueFd socket);

  int fd() const { return socket_.get(); }

  // The next packet; waits for it. UNAVAILABLE: the supervisor closed its end.
  // INVALID_ARGUMENT: a packet that is no AdoptConnection with one fd; it was
  // taken, and the next one can be.
  absl::StatusOr<AdoptedConnection> Receive();

  absl::Status SendReady();
  absl::Status SendFinished();

 private:
  absl::Status Send(const v1::EngineEvent& event);

  const UniqueFd socket_;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_ENGINE_CONTROL_CHANNEL_H_
