#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_HOST_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_HOST_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/accept/peer_credentials.h"
#include "server/observe/counters.h"
#include "server/os/event_loop.h"
#include "server/supervisor/engine_process.h"
#include "server/supervisor/job_events.h"
#include "server/supervisor/restart_policy.h"

namespace optstate::supervisor {

// A connection on its way to a job's engine.
struct Waiting {
  v1::AdoptConnection adopt;
  accept::PeerCredentials peer;
  UniqueFd fd;
  observe::InQueue in_queue{observe::Queue::kEngine};
};

// Keeps one job's engine alive and hands connections to it.
//
// Starting adopts an engine that runs already (its supervisor has died, or was
// replaced), or else starts one. The engine is given the gradients kept of the
// previous one. They are kept for the lifetime of the object or until the
// engine drops them, also while the job is FAILED: without them, a step that
// was being applied could not be finished.
//
// Connections that come while no engine is ready wait for it, kWaitingMax of
// them at most; those that come while the job is stopping wait for TakeWaiting.
// A copy of a connection given to the engine is kept until the engine has read
// it: nothing else could detect that its peer has gone. After that no copy may
// exist, for the peer would not notice that the engine closes the connection.
//
// Threads: the loop's. The loop outlives the object. on_stopped may destroy the
// object, the other callbacks may not.
// Size: one state machine; each method is a call or an event of the engine's
// life.
class JobHost {
 public:
  static constexpr size_t kWaitingMax = 1024;  // the ranks of one job

  // The state of the job's engine; README.md says what leads from one to
  // another.
  enum class State {
    kStarting,
    kRunning,
    kReplacing,
    kBackingOff,
    kFailed,
    kStopping
  };

  struct Options {
    std::string executable;
    v1::EngineConfig config;
    KeptSegments kept;  // by the previous supervisor
    // The job was created just now, so that no engine of a former supervisor
    // can run.
    bool is_new = false;
    // The time that an engine has to get ready: it maps files, and waits for
    // its predecessor's lock. While it reads records from disk, the time begins
    // again.
    absl::Duration start_timeout = absl::Minutes(2);
    // The time that an engine has to finish its pass and end. While it brings
    // records to disk, the time begins again.
    absl::Duration stop_timeout = absl::Seconds(20);
  };
  struct Callbacks {
    // Returns why no engine may be started just now, else OK.
    std::function<absl::Status()> check_start;
    // Returns the first message to an engine.
    std::function<v1::SupervisorRequest::Supervise()> supervise;
    // An engine is ready. Passes the supervisor's end of the private gRPC
    // connection to the engine, and the inodes of the engine's connections.
    std::function<void(UniqueFd grpc, const std::vector<uint64_t>& connections)>
        on_engine;
    // An engine process exists: one that was started and has not been told to
    // open its job yet, or one that was adopted.
    std::function<void(pid_t)> on_process;
    std::function<void()> on_engine_gone;
    std::function<void()> on_failed;
    // The engine was given this connection.
    std::function<void(int fd)> on_adopted;
    // The connection's peer has gone before the engine has read it; the fd is
    // closed afterwards.
    std::function<void(int fd)> on_hung_up;
    // An engine that was told to end is bringing records to disk, and comes on.
    std::function<void()> on_end_progress;
    // The engine is gone for good. `over`: the job is over (ephemeral, or no
    // rank registered or could) and has nothing durable on a disk, so that its
    // directory should be removed.
    std::function<void(bool over)> on_stopped;
  };

  JobHost(os::EventLoop* loop, Options options, Callbacks callbacks);
  ~JobHost();
  JobHost(const JobHost&) = delete;
  JobHost& operator=(const JobHost&) = delete;

  void Start();

  // Hands a connection to the engine. FAILED_PRECONDITION: the job is FAILED,
  // and why. RESOURCE_EXHAUSTED: too many connections wait, or the resource
  // that its engine lacks to start. Takes the content of `waiting` only when
  // OK.
  absl::Status Adopt(Waiting* waiting);

  // Pauses or resumes: while held, connections wait instead of reaching the
  // engine.
  void SetHeld(bool held);
  // Tells the present engine; a later one is told in its introduction.
  void SetDraining(bool draining);

  size_t waiting_count() const { return waiting_.size(); }
  // Connections given to the engine, which may not have read them yet.
  const std::vector<UniqueFd>& unread() const { return unread_; }
  // Drops connections whose peer has gone, and copies of connections that the
  // engine has read. Also happens automatically after a short delay.
  void DropEnded();

  // Starts the engine of a FAILED job again, as if none had died. An engine
  // that still runs and calls the job FAILED, with pid `failed_engine`, is
  // ended before. 0: no running engine does. With `to_durable` the next engine
  // gives up what is in memory for the last durable step. FAILED_PRECONDITION:
  // the job is not FAILED, or has nothing durable.
  absl::Status Recover(pid_t failed_engine, bool to_durable);

  // Ends the engine and starts another, which is not counted as a restart;
  // on_engine or on_failed follows. FAILED_PRECONDITION: no engine is running.
  absl::Status ReplaceEngine();

  // Asks the engine to end, without waiting for that.
  void TellEngineToStop() {
    if (engine_ != nullptr) engine_->Stop();
  }

  // Ends the engine; on_stopped follows, from the loop, even when there is no
  // engine.
  void Stop();

  // Takes the connections that came too late for the engine; to be called at
  // on_stopped.
  std::deque<Waiting> TakeWaiting();

  const std::string& name() const { return options_.config.job(); }
  uint32_t uid() const { return options_.config.uid(); }
  State state() const { return state_; }
  // Why the job is FAILED, or why its engine is missing just now.
  const std::string& reason() const { return reason_; }
  pid_t engine_pid() const { return engine_ == nullptr ? 0 : engine_->pid(); }
  uint32_t restarts() const { return options_.config.restarts(); }
  // The bytes of records that an engine which is being started has read and
  // written so far.
  uint64_t start_disk_bytes() const {
    return state_ == State::kStarting ? worked_bytes_ : 0;
  }
  // The Ready message of the last engine that was ready.
  const v1::EngineEvent::Ready& engine_info() const { return engine_info_; }
  const KeptSegments& kept() const { return kept_; }
  const std::string& directory() const { return options_.config.job_dir(); }

 private:
  void StartEngine();
  absl::StatusOr<std::unique_ptr<EngineProcess>> AdoptRunning();
  absl::StatusOr<std::unique_ptr<EngineProcess>> StartNew();
  EngineProcess::Callbacks EngineCallbacks();
  void OnReady(const v1::EngineEvent::Ready& ready);
  void OnWorking(uint64_t disk_bytes);
  void OnRankLost(const v1::EngineEvent::RankLost& lost) const;
  void OnFinished();
  void OnExit(const std::string& how);
  void OnDeath(const std::string& how);
  void Fail(const std::string& why);
  std::string DurableFolder() const;
  absl::Status AskForDurable() const;
  bool HasState() const;
  bool MayGiveUp() const { return !one_may_run_ && !HasState(); }
  void GiveUp(const absl::Status& why);
  void RefuseWaiting(const absl::Status& status);
  absl::Status FailedStatus() const;
  void Pump();
  // Schedules DropEnded() shortly, if there is anything to drop.
  void LookLater();
  void ArmTimer(absl::Duration delay, std::function<void()> callback);
  void StopEngine();
  void FinishStopping();
  void ReplaceRunning();
  // Kills the engine unless it gets ready, or ends, within its time.
  void LimitStart();
  void LimitStop();

  os::EventLoop* const loop_;
  Options options_;
  const Callbacks callbacks_;
  const JobEvents events_;
  RestartPolicy restart_policy_;
  State state_ = State::kBackingOff;
  bool held_ = false;
  bool over_ = false;
  bool stops_as_told_ = false;  // else it stops because the job is over
  bool adopted_ = false;        // the engine ran before this object
  // An engine of a former supervisor may run that was not adopted yet: until
  // then the job must not be removed, for its engine would go on without it.
  bool one_may_run_;
  std::string reason_;
  absl::Status given_up_;  // why a job without state was given up
  KeptSegments kept_;
  std::set<uint32_t> told_;  // ranks of kept_ reported by this engine
  v1::EngineEvent::Ready engine_info_;
  std::unique_ptr<EngineProcess> engine_;
  std::deque<Waiting> waiting_;
  std::vector<UniqueFd> unread_;
  uint64_t worked_bytes_ = 0;  // the most that this engine has reported
  bool looks_later_ = false;
  os::EventLoop::TimerId look_timer_;
  // Limits start-up, back-off or stopping, whichever the state is.
  os::EventLoop::TimerId timer_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_HOST_H_
