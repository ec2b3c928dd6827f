#ifndef OPTSTATE_SERVER_TESTING_DAEMON_HARNESS_H_
#define OPTSTATE_SERVER_TESTING_DAEMON_HARNESS_H_

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate::server {

struct ProcessExit {
  int code = -1;       // -signal when killed
  std::string output;  // output of all processes so far
};

// Real optstated processes on a directory of their own, and a client that can
// say Hello. At most one exists in a process at a time: the process becomes the
// reaper of orphans.
class DaemonHarness {
 public:
  // The limit of each wait, in real time; a test that waits this long fails.
  static constexpr absl::Duration kPatience = absl::Seconds(60);

  DaemonHarness();
  // Kills the processes that still run.
  ~DaemonHarness();

  // Starts optstated with any command line.
  pid_t Start(std::vector<std::string> args);
  // Starts a daemon on state() and socket(); returns when it takes connections.
  pid_t StartDaemon(const std::vector<std::string>& further = {});
  ProcessExit AwaitExit(pid_t pid);
  ProcessExit RunToEnd(std::vector<std::string> args);
  std::string Log() const;

  // Connects to socket(); -1: no process listens.
  UniqueFd Connect() const;
  // Opens a session, as far as its HelloReply.
  absl::StatusOr<UniqueFd> Open(const std::string& job) const;

  // Polls `holds` until it returns true; false after kPatience.
  static bool Eventually(const std::function<bool()>& holds);
  // Waits until the peer closes; false after kPatience.
  static bool ClosedByPeer(int fd);
  static bool Exists(const std::string& path);

  const std::string& root() const { return root_; }
  const std::string& state() const { return state_; }
  const std::string& socket() const { return socket_; }
  void set_socket(const std::string& path) { socket_ = path; }

 private:
  std::string root_;
  std::string state_;
  std::string socket_;
  std::vector<pid_t> started_;
};

}  // namespace optstate::server

#endif  // OPTSTATE_SERVER_TESTING_DAEMON_HARNESS_H_
