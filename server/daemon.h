#ifndef OPTSTATE_SERVER_DAEMON_H_
#define OPTSTATE_SERVER_DAEMON_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/engine.pb.h"

namespace optstate {

struct DaemonOptions {
  v1::DaemonConfig config;
  // Read end of a pipe that the trainer holds: the daemon is private to it,
  // and goes with it, taking its state directory along. -1: a node's daemon.
  int lifeline_fd = -1;
  // Started as engines.
  std::string executable = "/proc/self/exe";
  // Reads the configuration again.
  std::function<absl::StatusOr<v1::DaemonConfig>()> reload;
  // Of this process, for the one that is executed in its place at an upgrade.
  std::vector<std::string> arguments;
  // From the one before.
  std::optional<v1::SupervisorHandover> handover;
};

// optstated: builds the object graph bottom-up, serves until a signal or the
// lifeline ends it, and takes it down top-down; or executes another build in
// its own place. To be called in a process with one thread. OK after an orderly
// end.
absl::Status RunDaemon(DaemonOptions options);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_DAEMON_H_
