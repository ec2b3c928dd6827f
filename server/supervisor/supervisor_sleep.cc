// The part of the supervisor that puts jobs to sleep and wakes them.

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/supervisor/permissions.h"
#include "server/supervisor/supervisor.h"

namespace optstate::supervisor {
namespace {

absl::Status CheckCanSleep(const JobHost& host, pid_t engine) {
  if (host.state() != JobHost::State::kRunning || host.engine_pid() != engine) {
    return absl::FailedPreconditionError(
        absl::StrCat("job \"", host.name(), "\" has another engine, or none"));
  }
  if (host.kept().empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", host.name(), "\" has gradients of ", host.kept().size(),
      " ranks, which its engine may need to finish a step"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SleepOperation>> Supervisor::PutToSleep(
    const std::string& name, pid_t engine) {
  absl::StatusOr<std::shared_ptr<SleepOperation>> operation;
  RunInLoop([&] { operation = PutToSleepInLoop(name, engine); });
  return operation;
}

absl::StatusOr<std::shared_ptr<SleepOperation>> Supervisor::PutToSleepInLoop(
    const std::string& name, pid_t engine) {
  const auto found = hosts_.find(name);
  if (found == hosts_.end()) return WhyNoHost(name);
  // The job that was held has ended, and this is another of its name.
  if (!held_.contains(name)) return NoJob(name);
  if (options_.engines_exit_with_supervisor) {
    return absl::FailedPreconditionError(
        "a trainer's private daemon puts no job to sleep: its jobs end with "
        "the trainer. Start a daemon of the node (optstated)");
  }
  OPTSTATE_RETURN_IF_ERROR(CheckCanSleep(*found->second, engine));
  OPTSTATE_ASSIGN_OR_RETURN(SleepPlace place, registry_.FindSleepPlace(name));
  std::shared_ptr<SleepOperation> operation = sleeping_.Begin(std::move(place));
  found->second->Stop();
  return operation;
}

bool Supervisor::OnStoppedToSleep(JobHost* host, bool over) {
  const std::string& name = host->name();
  if (over || stopping_) {
    sleeping_.GiveUp(name, over ? absl::NotFoundError(absl::StrCat(
                                      "job \"", name, "\" has ended"))
                                : absl::AbortedError("the daemon ends"));
    return false;
  }
  held_.erase(name);
  // A rank that came after the check for ranks may have begun a step.
  if (host->kept().empty()) {
    sleeping_.CopyAway(name);
    return true;
  }
  sleeping_.GiveUp(name,
                   absl::FailedPreconditionError(absl::StrCat(
                       "job \"", name, "\": a rank has attached meanwhile")));
  options_.kept[name] = host->kept();
  StartHost(name, host->uid());
  return true;
}

absl::StatusOr<std::shared_ptr<SleepOperation>> Supervisor::WakeJob(
    const std::string& name, const access::Caller& caller) {
  absl::StatusOr<std::shared_ptr<SleepOperation>> operation;
  RunInLoop([&] { operation = WakeJobInLoop(name, caller); });
  return operation;
}

absl::StatusOr<std::shared_ptr<SleepOperation>> Supervisor::WakeJobInLoop(
    const std::string& name, const access::Caller& caller) {
  if (stopping_) return absl::UnavailableError("the daemon ends");
  if (!sleeping_.Has(name)) {
    OPTSTATE_RETURN_IF_ERROR(FindToChange(name, caller).status());
    return sleeping_.Wake(name);  // which says that it is not asleep
  }
  OPTSTATE_RETURN_IF_ERROR(CheckMayChange(name, sleeping_.uid(name), caller));
  if (held_.contains(name)) {
    return absl::UnavailableError(
        absl::StrCat("job \"", name, "\" is being deleted"));
  }
  if (options_.check_state_directory != nullptr) {
    OPTSTATE_RETURN_IF_ERROR(options_.check_state_directory());
  }
  OPTSTATE_RETURN_IF_ERROR(registry_.CheckDisksOf(name));
  return sleeping_.Wake(name);
}

void Supervisor::StartAwake(const std::string& name) {
  if (stopping_) return;
  StartHost(name, registry_.jobs().at(name));
  AddEngineWaiter(name, [this, name](const absl::StatusOr<std::string>& ready) {
    sleeping_.OnEngine(name, ready.status());
  });
}

void Supervisor::NoteInterruptedSleeps() {
  for (const auto& one : options_.interrupted_sleeps) {
    const auto found = registry_.jobs().find(one.job());
    // A job that is gone has no one to tell.
    if (found == registry_.jobs().end()) continue;
    sleeping_.NoteInterrupted(one, found->second);
  }
  options_.interrupted_sleeps.clear();
}

absl::Status Supervisor::WhyNoHost(const std::string& name) const {
  if (sleeping_.Has(name)) return sleeping_.WhyNoEngine(name);
  return NoJob(name);
}

}  // namespace optstate::supervisor
