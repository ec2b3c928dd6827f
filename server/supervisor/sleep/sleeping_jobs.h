#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEPING_JOBS_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEPING_JOBS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/engine.pb.h"
#include "server/os/event_loop.h"
#include "server/os/tree_remover.h"
#include "server/supervisor/job_events.h"
#include "server/supervisor/sleep/job_sleeper.h"
#include "server/supervisor/sleep/sleep_operation.h"

namespace optstate::supervisor {

// The jobs that are asleep, and those on their way to it or from it. Each way
// has a thread of its own, which copies files.
//
//   stopping --(engine gone)--> copying --> asleep --> waking --> starting
//
// A job that is stopping or starting has a JobHost as well, the others have
// none. A job that is starting is forgotten when its engine is ready, or cannot
// be.
//
// Threads: the loop's. The loop outlives the object. Destruction cancels what
// is under way, and leaves each job as a crash would: awake or asleep.
class SleepingJobs {
 public:
  // Starts the engine of a job that is awake: one that has been woken, or that
  // could not be put to sleep.
  using StartEngine = std::function<void(const std::string& job)>;

  SleepingJobs(os::EventLoop* loop, v1::DaemonConfig config, StartEngine start);
  ~SleepingJobs();
  SleepingJobs(const SleepingJobs&) = delete;
  SleepingJobs& operator=(const SleepingJobs&) = delete;

  // Adds a job that was asleep before this daemon.
  void Add(SleepPlace place);
  // Forgets an idle job that is deleted.
  void Forget(const std::string& job) { jobs_.erase(job); }
  // Ends copies early; their jobs stay as they are.
  void Cancel();

  // Returns whether the job is here and has no JobHost.
  bool Has(const std::string& job) const;
  // Returns whether the job is on its way.
  bool IsBusy(const std::string& job) const;
  std::vector<std::string> Names() const;  // of those without a JobHost
  uid_t uid(const std::string& job) const { return jobs_.at(job).place.uid; }

  // Returns why no rank can attach to a job without a JobHost.
  // FAILED_PRECONDITION: it is asleep; UNAVAILABLE: it is on its way.
  absl::Status RefuseRank(const std::string& job) const;
  // Returns FAILED_PRECONDITION with why such a job has no engine.
  absl::Status WhyNoEngine(const std::string& job) const;
  // Returns UNAVAILABLE, with how far it is, when a job is on its way.
  absl::Status CheckIdle(const std::string& job) const;
  // Describes the sleep of a job; nullopt: it is awake.
  std::optional<v1::SleepState> StateOf(const std::string& job) const;

  // Begins to put a job to sleep, whose engine the caller ends; CopyAway(), or
  // GiveUp(), follows.
  std::shared_ptr<SleepOperation> Begin(SleepPlace place);
  bool IsStopping(const std::string& job) const;
  void CopyAway(const std::string& job);
  // The job stays awake; the caller sees to its engine.
  void GiveUp(const std::string& job, const absl::Status& why);

  // Begins to wake a job, whose engine is started when its files are back;
  // OnEngine() follows. FAILED_PRECONDITION: it is not asleep; UNAVAILABLE: it
  // is on its way.
  absl::StatusOr<std::shared_ptr<SleepOperation>> Wake(const std::string& job);
  // A job that was awake again has an engine that is ready, or gets none.
  void OnEngine(const std::string& job, const absl::Status& status);

  // A job that is on its way, for the build that takes this one's place.
  using UnderWay = v1::SupervisorHandover::SleepUnderWay;
  std::vector<UnderWay> AllUnderWay() const;
  // Tells as an event what has become of a job that was on its way when the
  // build before this one made way; to be called once every job that is asleep
  // was added.
  void NoteInterrupted(const UnderWay& interrupted, uid_t owner) const;

 private:
  enum class State { kStopping, kCopying, kAsleep, kWaking, kStarting };
  struct Job {
    SleepPlace place;
    State state = State::kAsleep;
    std::shared_ptr<SleepOperation> operation;
    std::thread thread;
    absl::Time began_at;  // the operation
    // By the manifest; 0: not known.
    uint64_t disk_bytes = 0;
    uint64_t memory_bytes = 0;
    int64_t slept_at_s = 0;
  };

  static JobEvents EventsOf(const Job& job) {
    return {job.place.job, job.place.uid};
  }
  static void Note(const v1::SleepManifest& manifest, Job* job);
  // Runs `work` on a thread, and then `finish` in the loop with its result.
  template <typename Result>
  void Run(Job* job,
           std::function<Result(const SleepPlace&, CopyControl*)> work,
           void (SleepingJobs::*finish)(Job*, const Result&));
  void FinishSleep(Job* job, const absl::StatusOr<v1::SleepManifest>& slept);
  void FinishWake(Job* job, const absl::Status& woken);

  os::EventLoop* const loop_;
  const v1::DaemonConfig config_;
  const StartEngine start_;
  std::map<std::string, Job> jobs_;
  os::TreeRemover remover_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEPING_JOBS_H_
