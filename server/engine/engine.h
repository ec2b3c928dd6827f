#ifndef OPTSTATE_SERVER_ENGINE_ENGINE_H_
#define OPTSTATE_SERVER_ENGINE_ENGINE_H_

#include "optstate/v1/engine.pb.h"

namespace optstate {

// What the supervisor gives to an engine process.
struct EngineOptions {
  int control_fd = -1;  // SOCK_SEQPACKET: AdoptConnection in, EngineEvent out
  int grpc_fd = -1;     // SOCK_STREAM: gRPC, service Engine
  v1::EngineConfig config;
};

// The engine process of one job, from start to exit: opens the job, says Ready,
// serves the connections that the supervisor hands over, and says Finished when
// the job is over. Takes ownership of both fds.
//
// Returns the exit status: 0 after the control socket was closed (the
// supervisor is gone or wants it so), when the step that was being applied is
// finished and every session ended; 1 when it could not start, which the log
// says. A job that cannot be opened is no such case: the engine runs and
// answers everything with the reason.
//
// Signals: SIGTERM, SIGINT and SIGHUP are ignored, for they reach the whole
// process group and the supervisor decides; SIGPIPE too.
int RunEngine(const EngineOptions& options);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_ENGINE_ENGINE_H_
