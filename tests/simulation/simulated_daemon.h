#ifndef OPTSTATE_TESTS_SIMULATION_SIMULATED_DAEMON_H_
#define OPTSTATE_TESTS_SIMULATION_SIMULATED_DAEMON_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/session.pb.h"
#include "server/accept/peer_credentials.h"
#include "server/observe/peer_log.h"
#include "server/session/job.h"
#include "server/supervisor/job_registry.h"
#include "server/supervisor/look_budget.h"
#include "server/supervisor/restart_policy.h"
#include "server/supervisor/session_ledger.h"
#include "tests/simulation/mutation.h"
#include "tests/simulation/node_log.h"
#include "tests/simulation/tiny_job.h"
#include "tests/simulation/world.h"

namespace optstate::simulation {

// The daemon of one node: the real parts that decide about a Hello, about the
// jobs' directories and about an engine's restarts, in the order in which
// Supervisor uses them; and its job's engine, which is the real Job in this
// process. In place of processes, sockets and threads there are events: the
// supervisor's loop looks at one Hello at a time, and the engine at one rank.
//
// Threads: one at a time. Outlives all events that it has added.
// Size: one method for each thing that happens to a daemon.
class SimulatedDaemon {
 public:
  struct Options {
    uint32_t node = 0;
    std::string state_dir;
    uid_t owner = 0;  // of the ranks
    Mutation mutation = Mutation::kNone;
  };
  struct Counts {
    uint64_t hellos = 0;
    uint64_t refused = 0;
    uint64_t looks = 0;  // for sessions that have ended
    uint64_t engines = 0;
    uint64_t sessions_max = 0;  // in the ledger
  };

  // All pointers outlive the daemon.
  static absl::StatusOr<std::unique_ptr<SimulatedDaemon>> Start(
      World* world, const TinyJob* tiny, NodeLog* log, Options options);
  SimulatedDaemon(const SimulatedDaemon&) = delete;
  SimulatedDaemon& operator=(const SimulatedDaemon&) = delete;

  // A peer connects and sends a Hello; `socket` is the connection's number,
  // which is used once. Answered when the job's engine has the connection, or
  // with why it is refused. UNAVAILABLE: nobody listens, or the engine ended
  // first; the peer tries again.
  using Answer = std::function<void(const absl::Status&)>;
  void Connect(const accept::PeerCredentials& peer, v1::Hello hello,
               uint64_t socket, Answer answer);
  // The peer's end of the connection is closed.
  void Close(uint64_t socket) { open_.erase(socket); }

  // The job, while there is an engine; else null.
  session::Job* job() const { return job_.get(); }
  // The number of the present engine; another after each start, and 0 while
  // there is none.
  uint64_t engine() const { return job_ == nullptr ? 0 : engine_; }
  // Returns how long a request takes that the engine begins now, behind those
  // that it has: one at a time.
  absl::Duration QueueInEngine(const DrawnTime& time);

  // Notes that a rank has attached. `on_lost` is called when its engine ends.
  void NoteAttached(uint32_t rank, uint64_t socket,
                    std::function<void()> on_lost);
  // The engine sees the end of a rank's session that attached to `engine`;
  // `for_good`: the rank has said that it leaves.
  void EndSession(uint32_t rank, uint64_t engine, bool for_good);

  // A rank is about to bring its engine the decision about a step.
  void NoteDecision();

  // Asks the engine for a moment without a step under way, after which it may
  // be ended. False: there is none just now.
  bool TryPause();
  // Replaces the daemon and its engine by others, which begin from the files.
  // Like the next one, it has no effect while there is no engine.
  void Upgrade();
  // The engine dies; the daemon starts the next one, as its policy says.
  void KillEngine();
  // The machine is gone, with all that is in its memory.
  void Lose();

  const std::string& state_dir() const { return options_.state_dir; }
  uid_t owner() const { return options_.owner; }
  const Counts& counts() const { return counts_; }
  // The first thing that went wrong which no scenario expects.
  const absl::Status& failure() const { return failure_; }
  // Counts what is logged meanwhile as lines of this node.
  NodeLog::Scope LogHere() { return NodeLog::Scope(&log_, options_.node); }

 private:
  struct Waiting {
    uint64_t socket = 0;
    Answer answer;
  };
  enum class EngineState { kNone, kStarting, kRunning };

  SimulatedDaemon(World* world, const TinyJob* tiny, NodeLog* log,
                  Options options);

  // Makes everything that a supervisor process has in its memory.
  absl::Status StartSupervisor();
  void Look(const accept::PeerCredentials& peer, const v1::Hello& hello,
            uint64_t socket, const Answer& answer);
  // Decides as Supervisor::FindOrCreate does.
  absl::Status FindOrCreate(const accept::PeerCredentials& peer,
                            const v1::Hello& hello);
  absl::Status CheckRoomForSession(const accept::PeerCredentials& peer);
  void LookForEndedSessions();
  void Refuse(const accept::PeerCredentials& peer, const v1::Hello& hello,
              const absl::Status& status);
  // Writes a line that a peer can cause at will, as observe::LogOfPeer does.
  void LogOfPeer(absl::string_view kind, absl::string_view peer,
                 const std::string& line);
  void Adopt(const Waiting& waiting);
  void StartEngine(absl::Duration delay);
  void OpenJob();
  void EndEngine();
  // Kept where an engine forgets decisions: the job's files before the last
  // one.
  std::string undecided_directory() const {
    return options_.state_dir + "/undecided";
  }
  void RestoreUndecided();
  void ForgetPreparedStep();
  EventTag Tag(EventKind kind) const {
    return {.kind = kind, .node = options_.node};
  }

  World& world_;
  const TinyJob& tiny_;
  NodeLog& log_;
  const Options options_;
  const v1::DaemonConfig config_;

  // The supervisor.
  bool is_up_ = false;
  uint64_t supervisor_ = 0;  // its number
  std::optional<supervisor::JobRegistry> registry_;
  supervisor::SessionLedger sessions_;
  std::optional<supervisor::LookBudget> looks_;
  std::optional<supervisor::RestartPolicy> restarts_;
  std::optional<observe::LineLimiter> lines_;
  absl::Time loop_free_at_ = absl::InfinitePast();
  std::vector<Waiting> waiting_;

  // The engine.
  EngineState engine_state_ = EngineState::kNone;
  uint64_t engine_ = 0;
  std::unique_ptr<session::Job> job_;
  absl::Time engine_free_at_ = absl::InfinitePast();
  std::map<uint32_t, std::function<void()>> on_lost_;  // by rank

  std::set<ino_t> open_;        // connections whose peer lives
  std::vector<ino_t> adopted_;  // those that the engine was given
  bool is_lost_ = false;
  Counts counts_;
  absl::Status failure_;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_SIMULATED_DAEMON_H_
