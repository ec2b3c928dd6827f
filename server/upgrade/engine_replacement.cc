#include "server/upgrade/engine_replacement.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"
#include "server/observe/node_event.h"
#include "server/os/executable.h"

namespace optstate::upgrade {
namespace {

// An engine waits for its predecessor's memory to be unmapped, and maps files.
constexpr absl::Duration kReadyTimeout = absl::Minutes(3);
// Interval of checks whether this object is being destroyed.
constexpr absl::Duration kLook = absl::Seconds(1);
// Interval between two calls to an engine that is missing just now.
constexpr absl::Duration kAskAgain = absl::Milliseconds(2);

// Returns whether all unfinished work can be pushed again, which excludes a
// load, a step in recovery and accumulated gradients. Not every trainer repeats
// a load that is dropped with its engine.
bool CanBePushedAgain(const v1::Job& job) {
  if (job.phase() == v1::JOB_PHASE_LOADING || !job.open_load().empty() ||
      job.phase() == v1::JOB_PHASE_RECOVERING) {
    return false;
  }
  return !job.accumulate() || job.open_step().empty();
}

bool IsBetweenSteps(const v1::Job& job) {
  return CanBePushedAgain(job) && job.open_step().empty();
}

}  // namespace

EngineReplacement::EngineReplacement(const Options& options)
    : options_(options), thread_([this] { Run(); }) {}

EngineReplacement::~EngineReplacement() {
  ending_ = true;
  thread_.join();
}

void EngineReplacement::Run() {
  for (const supervisor::JobSummary& job : options_.control->Jobs()) {
    if (ending_) return;
    const absl::StatusOr<bool> replaced = Replace(job.name);
    if (!replaced.ok()) {
      spdlog::error("upgrade: job {}: {}", job.name,
                    replaced.status().ToString());
      options_.record->AddProblem(
          absl::StrCat("job ", job.name, ": ", replaced.status().message()));
    } else if (*replaced) {
      options_.record->AddReplaced();
    }
  }
  const v1::UpgradeProgress progress = options_.record->Get();
  spdlog::info("upgrade: done, {} engines replaced",
               progress.engines_replaced());
  observe::NoteNodeEvent(
      progress.problems().empty() ? v1::EVENT_SEVERITY_INFO
                                  : v1::EVENT_SEVERITY_WARNING,
      "upgrade_done",
      absl::StrCat("optstated ", kVersion, " runs, ",
                   progress.engines_replaced(), " engines replaced",
                   // Everybody sees the node's events, and not every job.
                   progress.problems().empty()
                       ? ""
                       : absl::StrCat("; ", progress.problems_size(),
                                      " not: `optctl status -o json` says "
                                      "which, and why")));
  options_.record->Finish();
}

absl::StatusOr<bool> EngineReplacement::Replace(const std::string& job) {
  const absl::StatusOr<std::string> engine = AwaitEngine(job);
  // A job that is gone or FAILED has no engine to replace.
  if (absl::IsNotFound(engine.status()) ||
      absl::IsFailedPrecondition(engine.status())) {
    return false;
  }
  if (!engine.ok()) return engine.status();
  OPTSTATE_ASSIGN_OR_RETURN(const std::string own,
                            os::ExecutableIdentity("/proc/self/exe"));
  if (*engine == own && !options_.replace_all) return false;
  OPTSTATE_RETURN_IF_ERROR(AwaitPause(job));
  const absl::Status replaced =
      options_.control->ReplaceEngine(job, absl::Now() + kLook);
  if (replaced.ok()) return true;
  if (!absl::IsDeadlineExceeded(replaced)) return replaced;
  OPTSTATE_RETURN_IF_ERROR(AwaitEngine(job).status());
  return true;
}

absl::StatusOr<std::string> EngineReplacement::AwaitEngine(
    const std::string& job) {
  const absl::Time deadline = absl::Now() + kReadyTimeout;
  while (true) {
    absl::StatusOr<std::string> engine =
        options_.control->AwaitEngine(job, absl::Now() + kLook);
    if (!absl::IsDeadlineExceeded(engine.status()) || ending_ ||
        absl::Now() > deadline) {
      return engine;
    }
  }
}

absl::Status EngineReplacement::AwaitPause(const std::string& job) {
  const absl::Time deadline = absl::Now() + options_.patience;
  while (!ending_) {
    const absl::Status paused =
        AskForPause(job, std::min(absl::Now() + kLook, deadline));
    if (paused.ok()) return absl::OkStatus();
    if (absl::Now() > deadline) return CheckStopInside(job);
    if (!absl::IsDeadlineExceeded(paused)) absl::SleepFor(kAskAgain);
  }
  return absl::UnavailableError("the daemon ends");
}

absl::Status EngineReplacement::AskForPause(const std::string& job,
                                            absl::Time deadline) {
  absl::Status paused = options_.engines->Pause(job, deadline);
  if (!absl::IsUnimplemented(paused)) return paused;
  // The engine's build does not know the call. Only its described state can be
  // used, though that may have changed before the engine is stopped.
  OPTSTATE_ASSIGN_OR_RETURN(const v1::Job described,
                            options_.engines->GetJob(job, absl::Now() + kLook));
  return IsBetweenSteps(described) ? absl::OkStatus() : paused;
}

absl::Status EngineReplacement::CheckStopInside(const std::string& job) {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::Job described,
                            options_.engines->GetJob(job, absl::Now() + kLook));
  const std::string within = absl::FormatDuration(options_.patience);
  if (CanBePushedAgain(described)) {
    spdlog::warn(
        "upgrade: job {}: not between two steps within {} ({}): its "
        "engine is stopped inside one",
        job, within, described.open_step());
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "it keeps its engine, for within ", within, " there was no moment ",
      "without a load, a recovery or a step of accumulated gradients",
      "; upgrade again later"));
}

}  // namespace optstate::upgrade
