#ifndef OPTSTATE_SERVER_ENGINE_ENGINE_SERVICE_H_
#define OPTSTATE_SERVER_ENGINE_ENGINE_SERVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"
#include "server/session/wire_counters.h"

namespace optstate::engine {

// Answers the supervisor's questions about the job (service Engine) over the
// private sockets given to Serve(); no other process can reach it.
//
// Threads: thread-safe. Destruction ends open calls.
class EngineService {
 public:
  // `job` is null when the job could not be opened: `failure` is the answer
  // then, and the job is described as FAILED, with what `wires` has counted.
  // `job` and `wires` outlive the service.
  static absl::StatusOr<std::unique_ptr<EngineService>> Start(
      const v1::EngineConfig& config, session::Job* job,
      const absl::Status& failure, const session::WireCounters* wires);
  virtual ~EngineService() = default;

  // Serves a supervisor's socket. Each supervisor brings a socket of its own;
  // the previous one's is closed at its other end.
  virtual absl::Status Serve(UniqueFd socket) = 0;
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_ENGINE_SERVICE_H_
