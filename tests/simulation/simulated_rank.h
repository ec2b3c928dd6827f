#ifndef OPTSTATE_TESTS_SIMULATION_SIMULATED_RANK_H_
#define OPTSTATE_TESTS_SIMULATION_SIMULATED_RANK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/types/partition.h"
#include "proto/types/step_verdict.h"
#include "server/session/job_types.h"
#include "tests/simulation/collective.h"
#include "tests/simulation/gradient_area.h"
#include "tests/simulation/mutation.h"
#include "tests/simulation/simulated_daemon.h"
#include "tests/simulation/step_book.h"
#include "tests/simulation/tiny_job.h"
#include "tests/simulation/world.h"

namespace optstate::simulation {

// The script of one rank, as the Python client runs it: settle with the ranks
// of all nodes, attach, load the masters of a new job, and take steps in two
// phases; and reconnect when the engine ends. See README.md for the calls of
// the client that each part stands for.
//
// One object is one place of a node; Start() puts a new process there. Threads:
// one at a time. Outlives all events that it has added, and its daemon.
// Size: each method is a point at which the script waits.
class SimulatedRank final : private session::SessionListener {
 public:
  enum class State { kIdle, kRunning, kDone, kFailed, kKilled };

  // The things that ranks share; all outlive them.
  struct Surroundings {
    World* world = nullptr;
    TinyJob* tiny = nullptr;
    StepBook* book = nullptr;
    uint64_t* next_socket = nullptr;
    Mutation mutation = Mutation::kNone;
    // A rank has attached this long after its script began.
    std::function<void(absl::Duration)> on_attached;
    // A rank's process has ended by itself or was killed.
    std::function<void(uint32_t node)> on_ended;
  };

  SimulatedRank(const Surroundings* around, SimulatedDaemon* daemon,
                uint32_t node, uint32_t rank);
  SimulatedRank(const SimulatedRank&) = delete;
  SimulatedRank& operator=(const SimulatedRank&) = delete;

  // Starts a process, which ends when `last_step` is committed. `group`
  // outlives the rank.
  void Start(Collective* group, uint32_t member, uint64_t last_step);
  // Ends the process; the engine sees the end of its session, unless the
  // machine is lost (`is_lost`).
  void Kill(bool is_lost);

  // Changes the step after which the process ends, for all ranks alike.
  void set_last_step(uint64_t last_step) { last_step_ = last_step; }

  State state() const { return state_; }
  // Why the rank has FAILED.
  const absl::Status& status() const { return status_; }
  uint64_t committed_step() const { return committed_step_; }
  // The number of times that the rank has come back to an engine.
  uint64_t reconnects() const { return reconnects_; }

 private:
  // For which answer the rank waits.
  enum class Awaited { kNothing, kLoad, kCommit, kDecide };
  using Next = void (SimulatedRank::*)();

  void OnStepDone(uint64_t request_id, const absl::Status& status,
                  const session::StepOutcome& outcome) override;
  void TakeAnswer(const absl::Status& status,
                  const session::StepOutcome& outcome);

  // Goes on after the delay, unless the process ends before.
  void Later(absl::Duration delay, Next next);
  void LaterLocally(Next next) { Later(world_.Draw(world_.model.local), next); }
  void Gather(Contribution contribution,
              void (SimulatedRank::*next)(const Round&));

  // Connects, and goes on with `next` when the engine has the connection; tries
  // again as long as nobody listens.
  void Connect(bool must_exist, Next next);
  void Reconnect() { Connect(must_exist_, on_connected_); }
  void OnRefused(const absl::Status& status);
  // Closes the connection, and goes on with `next` after a pause that grows.
  void TryAgain(Next next);

  // Settling: NodeAgreement.settle.
  void Settle();
  void ReadPosition();
  void GatherPosition();
  void OnPositions(const Round& round);
  void BringVerdict();
  void OnBrought(const Round& round);

  // Attaching: Session::Open, NodeAgreement.check_attached.
  void Register();
  void Attach();
  absl::Status AttachTo(session::Job* job);
  void OnAttached();
  void OnLoaded();
  void CheckAlike();
  void OnAlike(const Round& round);

  // Stepping: NodeAgreement.take, Session::Decide.
  void NextStep();
  void Push();
  void Commit();
  // Returns what the rank's node has prepared; nullopt: it could not.
  std::optional<NodeStep> OwnVote() const;
  void OnPrepared();
  void OnVotes(const Round& round);
  // Returns the verdict that the rank brings: that of all ranks, unless it is
  // to break the protocol.
  Verdict VerdictOf(const Round& round);
  void Decide();
  void OnDecided();
  void TakeOutcome(const session::StepOutcome& outcome);
  void WriteGradients();
  absl::Status PushAll();
  bool FindsInf(uint64_t step) const;

  // Coming back: Session::Recover.
  bool IsConnected() const {
    return engine_ != 0 && engine_ == daemon_.engine();
  }
  void Recover(Next then);
  void OnAttachedAgain();
  void OnEngineLost();

  void Fail(const absl::Status& status) { End(State::kFailed, status); }
  // Ends the process. Its session ends a moment later, where there is one.
  void End(State state, const absl::Status& status);

  const Surroundings& around_;
  World& world_;
  SimulatedDaemon& daemon_;
  const uint32_t node_;
  const uint32_t rank_;

  // The process.
  State state_ = State::kIdle;
  absl::Status status_;
  uint64_t process_ = 0;  // its number: events of former ones are dropped
  Collective* group_ = nullptr;
  uint32_t member_ = 0;
  uint64_t last_step_ = 0;
  absl::Time started_at_;
  absl::Duration backoff_;
  int settle_rounds_ = 0;
  std::optional<NodePosition> position_;

  // The session.
  uint64_t client_instance_ = 0;
  uint64_t socket_ = 0;  // 0: there is none
  bool must_exist_ = false;
  Next on_connected_ = nullptr;
  uint64_t attaching_to_ = 0;  // the engine
  uint64_t engine_ = 0;        // to which the rank is attached; 0: to none
  bool comes_back_ = false;
  std::vector<Piece> pieces_;
  std::shared_ptr<GradientArea> area_;
  uint64_t attached_step_ = 0;  // the job's, when the rank attached
  v1::JobPhase phase_ = v1::JOB_PHASE_EMPTY;
  uint64_t committed_step_ = 0;
  Next after_recovery_ = nullptr;
  uint64_t reconnects_ = 0;

  // The open step, and the answer that is awaited.
  bool has_pushed_ = false;
  Awaited awaited_ = Awaited::kNothing;
  uint64_t request_ = 0;  // the last one
  absl::Status answer_status_;
  session::StepOutcome answer_;
  StepVerdict verdict_;
  Verdict last_verdict_ = Verdict::kCommit;  // of the step before
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_SIMULATED_RANK_H_
