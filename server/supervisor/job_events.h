#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_EVENTS_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_EVENTS_H_

#include <spdlog/common.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace optstate::supervisor {

// Tells what happens to one job, as a line of the log and as an event in
// observe::Events(). Each method is one kind of event.
//
// Threads: thread-safe.
class JobEvents {
 public:
  JobEvents(std::string job, uid_t owner)
      : job_(std::move(job)), owner_(owner) {}

  // `access`: who may use it besides its owner, as text; empty: nobody was
  // named.
  void Created(absl::string_view access = "") const;
  // The job has ended by itself: it was ephemeral, or no rank has registered.
  void Over() const;
  // `by`: the name of the caller who asked for it (access::Caller); empty:
  // nobody did.
  void Deleted(const std::string& by) const;
  void NotDeleted(const std::string& by, const absl::Status& why) const;
  // A caller has had the engine of the FAILED job started again.
  void Recovering(const std::string& by, bool to_durable) const;
  // `settings`: those that were set, as text.
  void SettingsChanged(const std::string& by, absl::string_view settings) const;
  // `access`: who may use the job from now on, as text.
  void AccessChanged(const std::string& by, absl::string_view access) const;
  // A verification has found damaged records on disk.
  void DamageFound(const std::string& by, uint64_t records) const;

  // `adopted`: it ran before this supervisor.
  void EngineReady(pid_t engine, bool adopted) const;
  void EngineNotStarted(absl::string_view why) const;
  // The engine is killed, because it `failed_to` ("get ready in 2m").
  void EngineKilled(pid_t engine, absl::string_view failed_to) const;
  void EngineDied(pid_t engine, absl::string_view how) const;

  // A rank's connection has ended without a detach. Those of one user's jobs
  // are told 64 times at once, and every 10 s after that: they leave other
  // events in the log. What was left out is said. `left_out_before`:
  // losses before this one that the engine did not tell.
  void RankLost(uint32_t rank, uint64_t committed_step,
                absl::string_view reason, uint64_t left_out_before = 0) const;
  // Tells how many losses were left out and not said yet, of each user for whom
  // an event may be written again; to be called now and then.
  static void TellLossesLeftOut();

  // The job's ways to sleep and awake, with how long they took. `disk_bytes`
  // lie there, `memory_bytes` were given back or are taken again;
  // `copied_bytes` were copied when it failed.
  void Asleep(absl::string_view folder, uint64_t disk_bytes,
              uint64_t memory_bytes, absl::Duration took) const;
  void NotPutToSleep(const absl::Status& why, uint64_t copied_bytes,
                     absl::Duration took) const;
  void Awake(uint64_t disk_bytes, uint64_t memory_bytes,
             absl::Duration took) const;
  void NotWoken(const absl::Status& why, uint64_t copied_bytes,
                absl::Duration took) const;

  // The job is FAILED; `kept` says what is left of it.
  void Failed(absl::string_view why, absl::string_view kept) const;
  // The job has no state and is removed, because its engine cannot start.
  void GivenUp(absl::string_view why) const;

 private:
  void Tell(spdlog::level::level_enum level, absl::string_view kind,
            absl::string_view text, const std::string& by = "") const;

  const std::string job_;
  const uid_t owner_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_EVENTS_H_
