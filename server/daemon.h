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
#include "server/accept/activated_sockets.h"

namespace optstate::server {

struct DaemonOptions {
  v1::DaemonConfig config;
  // Read end of a pipe that the trainer holds: the daemon is private to that
  // trainer, and ends with it, removing its state directory. -1: a node's
  // daemon.
  int lifeline_fd = -1;
  // The executable started as an engine.
  std::string executable = "/proc/self/exe";
  // Reads the configuration again.
  std::function<absl::StatusOr<v1::DaemonConfig>()> reload;
  // Arguments of this process, passed on to the build executed in its place at
  // an upgrade.
  std::vector<std::string> arguments;
  // The handover of the previous build.
  std::optional<v1::SupervisorHandover> handover;
  // Sockets that the service manager has opened; the daemon owns them from its
  // start on.
  std::vector<accept::ActivatedSocket> activated;
};

// optstated: builds the object graph bottom-up, serves until a signal or the
// lifeline ends it, and takes it down top-down; or executes another build in
// its own place. Must be called in a process with one thread. Returns OK after
// an orderly end.
absl::Status RunDaemon(DaemonOptions options);

// Checks what the configuration names beyond itself: the files of `tls` and
// `access`, users and groups. RunDaemon() checks the same.
absl::Status CheckNamedThings(const v1::DaemonConfig& config);

}  // namespace optstate::server

#endif  // OPTSTATE_SERVER_DAEMON_H_
