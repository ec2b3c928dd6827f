#ifndef OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_HARNESS_H_
#define OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_HARNESS_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"
#include "server/accept/acceptor.h"
#include "server/accept/handshake.h"
#include "server/accept/peer_credentials.h"
#include "server/os/event_loop.h"
#include "server/supervisor/sleep/sleeping_jobs.h"
#include "server/supervisor/supervisor.h"

namespace optstate::supervisor {

// A session as a client sees it.
struct TestSession {
  UniqueFd fd;
  uint64_t engine_pid = 0;
  std::string kept;  // see fake_engine.cc
};

// Runs everything between the socket and the engines in this process, with
// fake_engine processes; its loop runs on a thread.
class SupervisorHarness {
 public:
  // The limit of each wait, in real time, long enough for any machine: a test
  // that waits this long fails.
  static constexpr absl::Duration kPatience = absl::Seconds(60);

  SupervisorHarness();
  ~SupervisorHarness();

  // The configuration; to be changed before Start().
  v1::DaemonConfig& config() { return config_; }
  void Start();
  // Ends the supervisor, if one runs, and keeps its state; Start() may follow.
  void Stop();
  // Has the supervisor end all engines as Stop() does, and goes on itself;
  // Stop() is to follow.
  void StopEngines();
  // Ends the supervisor as SIGKILL would: engines are told nothing. Start() may
  // follow.
  void Abandon();
  // Behaves as a trainer's private daemon; to be called before Start().
  void set_engines_exit_with_supervisor() { engines_exit_ = true; }
  // Sets what says whether the state directory is in its place; to be called
  // before Start().
  void set_check_state_directory(std::function<absl::Status()> check) {
    check_state_directory_ = std::move(check);
  }
  // Hands kept gradients to the next Start() as an upgrade does; to be called
  // before Abandon().
  void HandOverKept();
  // Hands what is on its way to sleep or awake to the next Start(), likewise.
  void HandOverSleeps();
  // Has the next Start() find this on its way, in the place of an upgrade.
  void set_interrupted_sleeps(std::vector<SleepingJobs::UnderWay> sleeps) {
    sleeps_ = std::move(sleeps);
  }

  Supervisor& supervisor() { return *supervisor_; }
  const std::string& socket() const { return config_.socket(); }
  std::string JobDirectory(const std::string& job) const;

  UniqueFd Connect() const;
  static v1::Hello GoodHello(const std::string& job);
  static absl::Status SendHello(int fd, const v1::Hello& hello);
  // Receives a reply; returns the reply's own status, or that of receiving it.
  static absl::StatusOr<v1::HelloReply> ReceiveReply(int fd);
  absl::StatusOr<TestSession> Open(const v1::Hello& hello) const;
  absl::StatusOr<TestSession> Open(const std::string& job) const {
    return Open(GoodHello(job));
  }
  // Opens a session as another user of this machine. A test has no socket that
  // shows one, so the supervisor is given the connection as after its
  // handshake.
  absl::StatusOr<TestSession> OpenAs(uid_t uid, const std::string& job);

  // Gives the supervisor a Hello as if it came from this peer.
  void Greet(UniqueFd fd, const accept::PeerCredentials& peer,
             const v1::Hello& hello);

  std::optional<JobSummary> Find(const std::string& job);
  // Polls `holds` until it returns true; false after kPatience.
  static bool Eventually(const std::function<bool()>& holds);
  // Waits until the peer closes; false after kPatience.
  static bool ClosedByPeer(int fd);

 private:
  void Destroy();

  std::string root_;
  v1::DaemonConfig config_;
  bool engines_exit_ = false;
  std::function<absl::Status()> check_state_directory_;
  std::map<std::string, KeptSegments> kept_;
  std::vector<SleepingJobs::UnderWay> sleeps_;
  std::unique_ptr<os::EventLoop> loop_;
  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<accept::Handshakes> handshakes_;
  std::unique_ptr<accept::Acceptor> acceptor_;
  std::thread thread_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_HARNESS_H_
