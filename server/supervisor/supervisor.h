#ifndef OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_H_
#define OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_H_

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"
#include "server/accept/peer_credentials.h"
#include "server/access/caller.h"
#include "server/access/quotas.h"
#include "server/os/event_loop.h"
#include "server/os/tree_remover.h"
#include "server/supervisor/core_shares.h"
#include "server/supervisor/creation_budget.h"
#include "server/supervisor/job_audience.h"
#include "server/supervisor/job_deletion.h"
#include "server/supervisor/job_host.h"
#include "server/supervisor/job_registry.h"
#include "server/supervisor/kept_segments.h"
#include "server/supervisor/look_budget.h"
#include "server/supervisor/session_ledger.h"
#include "server/supervisor/sleep/sleeping_jobs.h"
#include "server/supervisor/supervisor_control.h"
#include "server/supervisor/user_limits.h"

namespace optstate::supervisor {

// Manages all jobs and decides which connections reach their engines.
//
// A Hello is checked in this order: its content (hello_check.h), draining, the
// job's owner or must_exist, the limits and quotas. Then the job's engine is
// found or started and gets the connection. A refused peer is sent a HelloReply
// with the reason.
//
// Threads: the loop's, except for SupervisorControl. The loop outlives the
// object.
// Size: one method for each call of the admin service and each event of a
// job.
class Supervisor : public SupervisorControl {
 public:
  struct Options {
    v1::DaemonConfig config;
    std::string executable;  // started as engine
    // Set for a trainer's private daemon: see EngineConfig.
    bool engines_exit_with_supervisor = false;
    // Gradients kept by the previous supervisor; see Kept().
    KeptByJob kept = {};
    // Returns why no job can be created, else OK; null: nothing could prevent
    // it.
    std::function<absl::Status()> check_state_directory = nullptr;
    // Left under way by the previous supervisor; see SleepsUnderWay().
    std::vector<SleepingJobs::UnderWay> interrupted_sleeps = {};
  };
  struct Callbacks {
    // Called as JobHost's on_engine.
    std::function<void(const std::string& job, UniqueFd grpc)> on_engine;
    std::function<void(const std::string& job)> on_engine_gone;
    // The job has no engine and gets none, unless it is recovered.
    std::function<void(const std::string& job)> on_no_engine;
  };

  Supervisor(os::EventLoop* loop, Options options, JobRegistry registry,
             Callbacks callbacks);

  // Adopts or starts an engine for every job of the registry.
  void Start();

  void OnHello(UniqueFd fd, const accept::PeerCredentials& peer,
               v1::Hello hello);

  // Ends every engine; then calls `done`, from the loop. Jobs that are over
  // meanwhile are removed, the others keep their state. Calls `on_progress`
  // again and again while an engine brings records to disk, which may take
  // minutes; null: no progress is reported.
  void Stop(std::function<void()> done,
            std::function<void()> on_progress = nullptr);

  // Returns the kept gradients by job. An engine reports its own to the next
  // supervisor, but may die before that.
  KeptByJob Kept() const;

  // Returns the jobs that are on their way to sleep or awake, which an upgrade
  // interrupts.
  std::vector<SleepingJobs::UnderWay> SleepsUnderWay() const {
    return sleeping_.AllUnderWay();
  }

  // Asks every engine to end and waits for none: this process ends immediately.
  void TellEnginesToStop();

  std::vector<JobSummary> Jobs() override;
  absl::StatusOr<JobSummary> FindJob(const std::string& name) override;
  absl::Status HoldJob(const std::string& name,
                       const access::Caller& caller) override;
  void ReleaseJob(const std::string& name) override;
  std::shared_ptr<JobDeletion> BeginDeletion(const std::string& name) override;
  absl::StatusOr<std::shared_ptr<SleepOperation>> PutToSleep(
      const std::string& name, pid_t engine) override;
  absl::StatusOr<std::shared_ptr<SleepOperation>> WakeJob(
      const std::string& name, const access::Caller& caller) override;
  absl::Status RecoverJob(const std::string& name, const access::Caller& caller,
                          pid_t failed_engine, bool to_durable) override;
  absl::Status SetAccess(const std::string& name, const v1::JobAccess& access,
                         const v1::JobAccess* before,
                         const access::Caller& caller) override;
  bool MaySee(const v1::Event& event,
              const access::Caller* caller) const override;
  absl::StatusOr<std::string> AwaitEngine(const std::string& name,
                                          absl::Time deadline) override;
  absl::Status ReplaceEngine(const std::string& name,
                             absl::Time deadline) override;
  absl::Status SetDraining(bool draining) override;
  bool draining() const override { return draining_; }

 private:
  // A job held for deletion: by which caller, and the deletion once it has
  // begun.
  struct Held {
    std::string by;
    std::shared_ptr<JobDeletion> deletion;
  };

  const v1::Limits& limits() const { return options_.config.limits(); }
  // Routes a connection to its job's engine; takes the content of `waiting`
  // only when OK.
  absl::Status Route(Waiting* waiting);
  absl::StatusOr<JobHost*> FindOrCreate(const Waiting& waiting);
  // Makes the job that a Hello asks for.
  absl::StatusOr<JobHost*> CreateJob(const Waiting& waiting);
  // Checks that the peer may attach to a job that is there.
  absl::Status CheckMayJoin(const v1::Hello& hello, uid_t owner,
                            const access::Caller& caller) const;
  absl::Status CheckMayChange(const std::string& name, uid_t owner,
                              const access::Caller& caller) const;
  // Returns the owner of a job for which `caller` may say who may use it.
  absl::StatusOr<uid_t> FindToSetAccess(const std::string& name,
                                        const access::Caller& caller) const;
  // `access` is one that a job of this owner can have.
  absl::Status SetAccessInLoop(const std::string& name, uid_t owner,
                               const v1::JobAccess& access,
                               const v1::JobAccess* before,
                               const access::Caller& caller);
  // Says who may see the events of a job that was there before this object.
  void BeginAudience(const std::string& name, uid_t owner);
  // Returns the quotas that bound what this peer may add to the jobs of
  // `owner`.
  absl::StatusOr<access::UserBounds> BoundsOf(
      const accept::PeerCredentials& peer, uid_t owner);
  absl::Status CheckRoomForJob(const accept::PeerCredentials& peer);
  // Checks the session limits for a job that belongs to `owner`; when they are
  // reached, looks for sessions that have ended, as far as looks_ allows.
  absl::Status CheckRoomForSession(const accept::PeerCredentials& peer,
                                   uid_t owner);
  absl::StatusOr<Counts> CountSessions(uid_t owner,
                                       const access::UserBounds& bounds);
  void LookForEndedSessions();
  JobHost* StartHost(const std::string& name, uid_t uid, bool is_new = false);
  v1::SupervisorRequest::Supervise MakeSupervise(uid_t owner) const;
  void OnAdopted(const std::string& name, int fd);
  void OnStopped(const std::string& name, bool over);
  void RemoveJob(const std::string& name, uid_t owner, Held held);
  // Routes connections that reached a job as it ended; they start the next job
  // of that name.
  void Reroute(std::deque<Waiting> waiting);
  void RunInLoop(const std::function<void()>& function);
  // `waiter` is called when the job's engine is ready, or cannot be.
  using EngineWaiter =
      std::function<void(const absl::StatusOr<std::string>& executable)>;
  void AddEngineWaiter(const std::string& name, EngineWaiter waiter);
  void WakeEngineWaiters(const std::string& name,
                         const absl::StatusOr<std::string>& executable);
  // Runs `begin` in the loop; if it is OK, waits for the engine.
  absl::StatusOr<std::string> AwaitEngineAfter(
      const std::string& name, absl::Time deadline,
      const std::function<absl::Status(JobHost*)>& begin);
  // Finds a job that `caller` may change. NOT_FOUND, or PERMISSION_DENIED.
  absl::StatusOr<JobHost*> FindToChange(const std::string& name,
                                        const access::Caller& caller);
  absl::Status HoldJobInLoop(const std::string& name,
                             const access::Caller& caller);
  void BeginDeletionInLoop(const std::string& name,
                           const std::shared_ptr<JobDeletion>& deletion);
  // Returns why a job that has no JobHost has no engine: it is asleep, or there
  // is none of that name.
  absl::Status WhyNoHost(const std::string& name) const;
  absl::StatusOr<std::shared_ptr<SleepOperation>> PutToSleepInLoop(
      const std::string& name, pid_t engine);
  absl::StatusOr<std::shared_ptr<SleepOperation>> WakeJobInLoop(
      const std::string& name, const access::Caller& caller);
  JobSummary Summarize(const JobHost& host) const;
  JobSummary SummarizeSleeping(const std::string& name) const;
  // Goes on with a job that is being put to sleep, now without an engine.
  // Returns false when the job has ended, and OnStopped() goes on.
  bool OnStoppedToSleep(JobHost* host, bool over);
  void StartAwake(const std::string& name);
  void NoteInterruptedSleeps();

  os::EventLoop* const loop_;
  Options options_;
  const Callbacks callbacks_;
  JobRegistry registry_;
  JobAudience audience_;
  access::Quotas quotas_;
  CoreShares shares_;
  SessionLedger sessions_;
  LookBudget looks_;
  CreationBudget creations_;
  std::map<std::string, std::unique_ptr<JobHost>> hosts_;
  std::map<std::string, Held> held_;
  std::multimap<std::string, EngineWaiter> engine_waiters_;
  std::atomic<bool> draining_{false};
  bool stopping_ = false;
  std::function<void()> on_all_stopped_;
  std::function<void()> on_stop_progress_;
  SleepingJobs sleeping_;
  os::TreeRemover remover_;  // destroyed first: its callbacks use the rest
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_H_
