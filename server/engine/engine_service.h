#ifndef OPTSTATE_SERVER_ENGINE_ENGINE_SERVICE_H_
#define OPTSTATE_SERVER_ENGINE_ENGINE_SERVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/session/job.h"

namespace optstate {

// Answers the supervisor's questions about the job (service Engine) over one
// private socket; nothing else can reach it.
//
// Threads: thread-safe. Destruction ends calls that are open.
class EngineService {
 public:
  // `job` may be null when it could not be opened: `failure` is the answer
  // then, and the job is described as FAILED. `job` outlives the service.
  static absl::StatusOr<std::unique_ptr<EngineService>> Start(
      UniqueFd socket, const v1::EngineConfig& config, Job* job,
      const absl::Status& failure);
  virtual ~EngineService() = default;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_ENGINE_ENGINE_SERVICE_H_
