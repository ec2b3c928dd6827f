#ifndef OPTSTATE_SERVER_ENGINE_CONNECTION_SERVER_H_
#define OPTSTATE_SERVER_ENGINE_CONNECTION_SERVER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/engine/awaited_ranks.h"
#include "server/engine/engine_service.h"
#include "server/engine/loss_reporter.h"
#include "server/engine/open_connections.h"
#include "server/engine/supervisor_link.h"
#include "server/engine/supervisor_reporter.h"
#include "server/session/job.h"
#include "server/session/wire_counters.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/grpc/grpc_transport.h"
#include "server/transport/session_table.h"
#include "server/transport/shm/shm_transport.h"

namespace optstate::engine {

// Takes connections from the supervisor, answers their Hello and gives them to
// the transport of their wire, until the supervisor stops it. Without a
// supervisor the existing sessions go on.
//
// A job that is over (see Job::finished(), or one that no rank registered
// before its last connection ended) is reported once; connections that come
// later are refused with UNAVAILABLE, and find a new engine when they try
// again.
//
// Threads: Run() by one thread.
class ConnectionServer {
 public:
  struct Options {
    v1::EngineConfig config;
    SupervisorLink* link = nullptr;
    SupervisorReporter* reporter = nullptr;
    EngineService* service = nullptr;
    // Null when the job could not be opened; each connection is answered with
    // `failure` then.
    session::Job* job = nullptr;
    absl::Status failure;
    // Counts the bytes of sessions, and what is refused; may be null.
    session::WireCounters* wires = nullptr;
  };

  // All arguments outlive the server.
  static absl::StatusOr<std::unique_ptr<ConnectionServer>> Start(
      Options options);

  // Takes a supervisor's first message; answers with Ready.
  void TakeSupervise(SupervisorMessage message);

  // Serves until the supervisor stops the engine.
  void Run();

 private:
  explicit ConnectionServer(Options options);

  absl::Status StartTransports();
  // Waits for the supervisor, the end of a session or of an awaited process, or
  // the next check for idleness, and handles what has happened.
  void ServeOnce();
  absl::Time NextLook() const;
  void TakeRequests();
  void TakeLimits(const v1::Limits& limits);
  void SetDraining(bool draining);
  v1::EngineEvent::Ready MakeReady();
  void Adopt(const v1::AdoptConnection& adopt, UniqueFd socket);
  absl::Status CheckOpen() const;
  absl::Status SendHelloReply(int socket, const v1::AdoptConnection& adopt,
                              const absl::Status& status) const;
  void FinishIfOver();
  bool IsOver() const;
  size_t SessionCount() const;

  const Options options_;
  absl::Duration handshake_timeout_;
  const uint64_t engine_instance_;
  UniqueFd session_ended_;
  OpenConnections connections_;
  std::optional<AwaitedRanks> awaited_;  // none without a job
  uint32_t control_version_;             // of the supervisor
  LossReporter losses_;
  bool finished_ = false;
  // Time of the last adopted connection, or of the start.
  absl::Time last_adopted_ = absl::InfinitePast();

  // Declared in this order so that sessions end before the objects that they
  // use.
  transport::SessionTable table_;
  std::unique_ptr<transport::FdWatcher> watcher_;
  std::unique_ptr<transport::ShmTransport> shm_;
  std::unique_ptr<transport::GrpcTransport> grpc_;
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_CONNECTION_SERVER_H_
