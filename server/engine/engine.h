#ifndef OPTSTATE_SERVER_ENGINE_ENGINE_H_
#define OPTSTATE_SERVER_ENGINE_ENGINE_H_

#include "optstate/v1/engine.pb.h"

namespace optstate::engine {

// The arguments that the supervisor gives to an engine process.
struct EngineOptions {
  int socket_fd = -1;  // listens on JOB_DIR/engine.sock for supervisors
  v1::EngineConfig config;
};

// Runs the engine process of one job, from start to exit: waits for its
// supervisor and for what was kept of the previous engine, opens the job, says
// Ready, serves the connections that it is handed, and says Finished when the
// job is over. When its supervisor dies, the engine goes on with its sessions
// and waits for the next supervisor (but see
// EngineConfig.exit_with_supervisor). Takes ownership of the fd.
//
// Does not return after the supervisor has said Stop: once a running pass is
// finished, the process ends as if it were killed, with status 0. Otherwise
// returns the exit status: 0 when the supervisor ended before it named the job;
// 1 when the engine could not start, which is logged. A job that cannot be
// opened is no such case: the engine runs and answers every call with the
// reason.
//
// Signals: SIGTERM, SIGINT and SIGHUP are ignored, for they reach the whole
// process group and the supervisor decides; SIGPIPE too.
int RunEngine(const EngineOptions& options);

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_ENGINE_H_
