// The part of the supervisor that makes jobs and knows who may use them.

#include <string>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/access/job_access.h"
#include "server/observe/event_log.h"
#include "server/supervisor/job_events.h"
#include "server/supervisor/permissions.h"
#include "server/supervisor/supervisor.h"
#include "storage/tmpfs_info.h"

namespace optstate::supervisor {
namespace {

absl::Status HasOneUser() {
  return absl::FailedPreconditionError(
      "a trainer's private daemon has one user and ends with the trainer: "
      "group, private and readers are for jobs of a daemon of the node "
      "(optstated)");
}

// Names whose budget of new jobs counts: that of the user, however many
// identities come as that. Over TCP without TLS there is no user.
std::string CreatorOf(const accept::PeerCredentials& peer) {
  return peer.caller.via == access::Via::kInsecureTcp
             ? peer.quota_name()
             : absl::StrCat("uid ", peer.caller.uid);
}

}  // namespace

absl::StatusOr<JobHost*> Supervisor::CreateJob(const Waiting& waiting) {
  const v1::Hello& hello = waiting.adopt.hello();
  const std::string& name = hello.job();
  const uid_t owner = waiting.adopt.peer_uid();
  if (hello.has_access() && options_.engines_exit_with_supervisor) {
    return HasOneUser();
  }
  OPTSTATE_RETURN_IF_ERROR(CheckRoomForSession(waiting.peer, owner));
  OPTSTATE_RETURN_IF_ERROR(CheckRoomForJob(waiting.peer));
  if (!HasNoQuota(waiting.peer)) {
    OPTSTATE_RETURN_IF_ERROR(creations_.Take(CreatorOf(waiting.peer)));
  }
  // The names are looked up one by one, which is part of what the budget is
  // for.
  if (hello.has_access()) {
    OPTSTATE_RETURN_IF_ERROR(access::CheckJobAccess(hello.access(), owner));
  }
  if (options_.check_state_directory != nullptr) {
    OPTSTATE_RETURN_IF_ERROR(options_.check_state_directory());
  }
  OPTSTATE_RETURN_IF_ERROR(
      storage::ExplainFull(registry_.Create(name, owner, hello.access()),
                           options_.config.state_dir()));
  audience_.Begin(name, owner, hello.access(),
                  observe::Events().Await(0, absl::InfinitePast()));
  JobEvents(name, owner)
      .Created(hello.has_access() ? access::AccessText(hello.access()) : "");
  return StartHost(name, owner, /*is_new=*/true);
}

absl::Status Supervisor::CheckMayJoin(const v1::Hello& hello, uid_t owner,
                                      const access::Caller& caller) const {
  const v1::JobAccess& access = registry_.AccessOf(hello.job()).access;
  // A peer that looks for a job of its own is not told of another's.
  if (hello.must_exist() && CheckMayTrain(caller).ok()) {
    OPTSTATE_RETURN_IF_ERROR(CheckMayLook(hello.job(), owner, access, caller));
  }
  return CheckMayJoinJob(hello.job(), owner, access, caller);
}

absl::Status Supervisor::CheckMayChange(const std::string& name, uid_t owner,
                                        const access::Caller& caller) const {
  return CheckMayChangeJob(name, owner, registry_.AccessOf(name).access,
                           caller);
}

absl::Status Supervisor::SetAccess(const std::string& name,
                                   const v1::JobAccess& access,
                                   const v1::JobAccess* before,
                                   const access::Caller& caller) {
  absl::StatusOr<uid_t> owner = NoJob(name);
  RunInLoop([&] { owner = FindToSetAccess(name, caller); });
  OPTSTATE_RETURN_IF_ERROR(owner.status());
  if (options_.engines_exit_with_supervisor) return HasOneUser();
  // The tables of users may be slow. They are asked here, so that nobody else
  // waits for them.
  OPTSTATE_RETURN_IF_ERROR(access::CheckJobAccess(access, *owner));
  absl::Status status;
  RunInLoop(
      [&] { status = SetAccessInLoop(name, *owner, access, before, caller); });
  return status;
}

absl::StatusOr<uid_t> Supervisor::FindToSetAccess(
    const std::string& name, const access::Caller& caller) const {
  const auto found = registry_.jobs().find(name);
  if (found == registry_.jobs().end()) return NoJob(name);
  OPTSTATE_RETURN_IF_ERROR(CheckMayChangeAccess(
      name, found->second, registry_.AccessOf(name).access, caller));
  return found->second;
}

absl::Status Supervisor::SetAccessInLoop(const std::string& name, uid_t owner,
                                         const v1::JobAccess& access,
                                         const v1::JobAccess* before,
                                         const access::Caller& caller) {
  OPTSTATE_ASSIGN_OR_RETURN(const uid_t now, FindToSetAccess(name, caller));
  if (now != owner) {
    return absl::UnavailableError(absl::StrCat(
        "job \"", name,
        "\" was deleted, and another user has made one of that name, while "
        "this was asked for: try again, if it is that one"));
  }
  OPTSTATE_RETURN_IF_ERROR(sleeping_.CheckIdle(name));
  if (held_.contains(name)) {
    return absl::UnavailableError(absl::StrCat(
        "job \"", name, "\" is being deleted or put to sleep: try again"));
  }
  const v1::JobAccess& in_force = registry_.AccessOf(name).access;
  if (before != nullptr && !access::IsSameAccess(*before, in_force)) {
    return absl::AbortedError(absl::StrCat(
        "who may use job \"", name, "\" was changed meanwhile, and is now: ",
        access::AccessText(in_force)));
  }
  OPTSTATE_RETURN_IF_ERROR(registry_.SetAccess(name, access));
  audience_.Change(name, access);
  JobEvents(name, owner)
      .AccessChanged(caller.name(), access::AccessText(access));
  return absl::OkStatus();
}

// An upgrade hands the events of the former build over, also those of former
// jobs of this name. The log forgets the oldest events of a user first: without
// the event of its making it has none of an earlier job either.
void Supervisor::BeginAudience(const std::string& name, uid_t owner) {
  uint64_t after_sequence = 0;
  for (const v1::Event& event : observe::Events().After(0, name)) {
    // As JobEvents::Created() writes it.
    if (event.kind() == "job_created" && event.owner_uid() == owner) {
      after_sequence = event.sequence() - 1;
    }
  }
  audience_.Begin(name, owner, registry_.AccessOf(name).access, after_sequence);
}

bool Supervisor::MaySee(const v1::Event& event,
                        const access::Caller* caller) const {
  return caller == nullptr ? audience_.IsPublic(event)
                           : audience_.MaySee(event, *caller);
}

JobSummary Supervisor::Summarize(const JobHost& host) const {
  const KnownAccess& known = registry_.AccessOf(host.name());
  JobSummary summary;
  summary.name = host.name();
  summary.uid = host.uid();
  summary.failed = host.state() == JobHost::State::kFailed;
  summary.reason = host.reason();
  summary.engine_pid = host.engine_pid();
  summary.restarts = host.restarts();
  summary.start_disk_bytes = host.start_disk_bytes();
  summary.kept_count = host.kept().size();
  summary.directory = host.directory();
  summary.access = known.access;
  summary.access_problem = known.problem;
  return summary;
}

JobSummary Supervisor::SummarizeSleeping(const std::string& name) const {
  const KnownAccess& known = registry_.AccessOf(name);
  JobSummary summary;
  summary.name = name;
  summary.uid = sleeping_.uid(name);
  summary.directory = registry_.JobDirectory(name);
  summary.sleep = sleeping_.StateOf(name);
  summary.reason = std::string(sleeping_.WhyNoEngine(name).message());
  summary.access = known.access;
  summary.access_problem = known.problem;
  return summary;
}

}  // namespace optstate::supervisor
