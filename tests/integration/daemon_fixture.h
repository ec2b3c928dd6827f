#ifndef OPTSTATE_TESTS_INTEGRATION_DAEMON_FIXTURE_H_
#define OPTSTATE_TESTS_INTEGRATION_DAEMON_FIXTURE_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate {

// A process that is known by its pidfd, so that its end can be awaited even
// when it is not a child, and a reused pid is never hit.
class Process {
 public:
  explicit Process(pid_t pid);

  pid_t pid() const { return pid_; }
  bool running() const;
  void Signal(int signal) const;
  // Returns DEADLINE_EXCEEDED when the process has not ended. Reaps it if it is
  // a child.
  absl::Status AwaitEnd(absl::Time deadline) const;

 private:
  pid_t pid_;
  UniqueFd fd_;
};

// The real optstated, on a directory and a socket of its own.
//
// The directory is on tmpfs where there is one. When the object is destroyed,
// the daemon and every engine it left behind are killed and the directory goes.
// One per process at a time: it makes the process the reaper of orphans.
//
// Threads: one at a time.
class TestDaemon {
 public:
  struct Options {
    bool tcp = false;                // listen on 127.0.0.1 too, port zero
    std::vector<std::string> flags;  // further ones
    std::string config;              // text of a configuration file, or none
    std::string state_dir = {};      // empty: a fresh one in directory()
  };

  // Starts a daemon; returns when it takes connections. The error ends with its
  // log.
  static absl::StatusOr<std::unique_ptr<TestDaemon>> Start(Options options);
  static absl::StatusOr<std::unique_ptr<TestDaemon>> Start() {
    return Start(Options());
  }
  ~TestDaemon();

  std::string shm_endpoint() const { return "unix:" + socket_; }
  std::string grpc_endpoint() const { return "grpc:unix:" + socket_; }
  // Returns the endpoint that Options::tcp asks for.
  absl::StatusOr<std::string> tcp_endpoint() const;
  const std::string& socket() const { return socket_; }
  const std::string& directory() const { return directory_; }
  const std::string& state_dir() const { return state_dir_; }
  const Process& process() const { return *process_; }
  // Returns the last lines that the daemon and its engines have said.
  std::string Log() const;

  // Returns the pid of the daemon that listens at a socket.
  static absl::StatusOr<pid_t> PidAt(const std::string& socket);

  absl::StatusOr<v1::ServerStatus> GetStatus() const;
  // Returns the job's status; `memory`: also by page size and NUMA node.
  absl::StatusOr<v1::Job> GetJob(const std::string& name,
                                 bool memory = false) const;
  absl::Status Drain(absl::Duration timeout, bool resume) const;
  // Asks for an upgrade to the build that it is, as `optctl upgrade` does;
  // returns what GetStatus() calls it. Another thread may call this.
  absl::StatusOr<std::string> Upgrade() const;
  // Writes another configuration in the place of that of Options, has the
  // daemon read it by SIGHUP, and returns when it is in force.
  absl::Status Reload(const std::string& config) const;

  // SIGKILLs the job's engine and returns when it is dead.
  absl::Status KillEngine(const std::string& job) const;
  // SIGKILLs the daemon and returns when it is dead.
  absl::Status Kill();
  // Sends SIGTERM; returns when the daemon has ended.
  absl::Status Terminate();
  // Starts the daemon again on the same directory and socket.
  absl::Status Restart();

 private:
  explicit TestDaemon(Options options);
  absl::Status Spawn();
  std::string config_path() const { return directory_ + "/optstated.yaml"; }

  const Options options_;
  std::string directory_;
  std::string state_dir_;
  std::string socket_;
  std::unique_ptr<Process> process_;
};

}  // namespace optstate

#endif  // OPTSTATE_TESTS_INTEGRATION_DAEMON_FIXTURE_H_
