#ifndef OPTSTATE_SERVER_ENGINE_CONNECTION_SERVER_H_
#define OPTSTATE_SERVER_ENGINE_CONNECTION_SERVER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/engine/control_channel.h"
#include "server/session/job.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/grpc_transport.h"
#include "server/transport/session_table.h"
#include "server/transport/shm_transport.h"

namespace optstate {

// Takes connections from the control channel, answers their Hello and gives
// them to the transport of their wire, until the supervisor closes the channel.
//
// A job that is over (see Job::finished(), or one that nobody registered before
// its last connection ended) is reported once; connections that come later are
// refused with UNAVAILABLE, and find a new engine when they try again.
//
// Threads: Run() by one thread.
class ConnectionServer {
 public:
  // Everything outlives the server. `job` is null when it could not be opened;
  // each connection is answered with `failure` then.
  static absl::StatusOr<std::unique_ptr<ConnectionServer>> Start(
      const v1::EngineConfig& config, ControlChannel* control, Job* job,
      const absl::Status& failure);

  // Says Ready, then serves. When it returns, all sessions have ended.
  void Run();

 private:
  ConnectionServer(const v1::EngineConfig& config, ControlChannel* control,
                   Job* job, const absl::Status& failure);

  absl::Status StartTransports();
  // Waits for the control channel, a session's end or the next look at
  // idleness; false: the supervisor closed.
  bool ServeOnce();
  void Adopt(AdoptedConnection adopted);
  absl::Status CheckOpen() const;
  absl::Status SendHelloReply(const AdoptedConnection& adopted,
                              const absl::Status& status) const;
  void FinishIfOver();
  bool IsOver() const;
  size_t SessionCount() const;

  const v1::EngineConfig config_;
  ControlChannel* const control_;
  Job* const job_;
  const absl::Status failure_;
  const absl::Duration handshake_timeout_;
  const uint64_t engine_instance_;
  UniqueFd session_ended_;
  bool adopted_any_ = false;
  bool finished_ = false;
  absl::Time last_adopted_ = absl::InfinitePast();

  // In this order: sessions end before what they use.
  SessionTable table_;
  std::unique_ptr<FdWatcher> watcher_;
  std::unique_ptr<ShmTransport> shm_;
  std::unique_ptr<GrpcTransport> grpc_;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_ENGINE_CONNECTION_SERVER_H_
