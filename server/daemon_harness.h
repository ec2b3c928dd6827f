#ifndef OPTSTATE_SERVER_DAEMON_HARNESS_H_
#define OPTSTATE_SERVER_DAEMON_HARNESS_H_

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate {

struct ProcessExit {
  int code = -1;       // -signal when killed
  std::string output;  // of all processes so far
};

// Real optstated processes on a directory of their own, and a client that can
// say Hello. One a process at a time: it becomes the reaper of orphans.
class DaemonHarness {
 public:
  // Real time; a test that waits this long fails.
  static constexpr absl::Duration kPatience = absl::Seconds(60);

  DaemonHarness();
  // Kills what still runs.
  ~DaemonHarness();

  // Any command line.
  pid_t Start(std::vector<std::string> args);
  // On state() and socket(); returns when it takes connections.
  pid_t StartDaemon(const std::vector<std::string>& further = {});
  ProcessExit AwaitExit(pid_t pid);
  ProcessExit RunToEnd(std::vector<std::string> args);
  std::string Log() const;

  // -1: nobody listens.
  UniqueFd Connect() const;
  // A session, as far as its HelloReply.
  absl::StatusOr<UniqueFd> Open(const std::string& job) const;

  // Asks again and again until it holds; false after kPatience.
  static bool Eventually(const std::function<bool()>& holds);
  // Until the peer closes; false after kPatience.
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

}  // namespace optstate

#endif  // OPTSTATE_SERVER_DAEMON_HARNESS_H_
