#include "server/supervisor/supervisor.h"

#include <spdlog/spdlog.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/accept/refusal.h"
#include "server/observe/event_log.h"
#include "server/observe/node_event.h"
#include "server/observe/peer_log.h"
#include "server/os/open_sockets.h"
#include "server/os/tree_removal.h"
#include "server/supervisor/drain_marker.h"
#include "server/supervisor/job_events.h"
#include "server/supervisor/permissions.h"

namespace optstate::supervisor {
namespace {

void Refuse(const Waiting& waiting, const absl::Status& status) {
  observe::LogOfPeer(spdlog::level::info, "session refused",
                     waiting.peer.quota_name(),
                     "session for job {} of {} pid {} refused: {}",
                     waiting.adopt.hello().job(), waiting.peer.caller.name(),
                     waiting.adopt.peer_pid(), status.ToString());
  accept::SendRefusal(waiting.fd.get(), status);
}

absl::Status IsFailed(const JobHost& host) {
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", host.name(), "\" is FAILED: ", host.reason()));
}

// Returns whether the last event about draining says that it has begun: an
// upgrade continues the events of the build before this one.
bool IsDrainingTold() {
  bool is_told = false;
  for (const v1::Event& event : observe::Events().After(0)) {
    if (event.kind() == "drain_begun") is_told = true;
    if (event.kind() == "drain_ended") is_told = false;
  }
  return is_told;
}

}  // namespace

Supervisor::Supervisor(os::EventLoop* loop, Options options,
                       JobRegistry registry, Callbacks callbacks)
    : loop_(loop),
      options_(std::move(options)),
      callbacks_(std::move(callbacks)),
      registry_(std::move(registry)),
      quotas_(options_.config),
      shares_(CoreShares::Find(
          options_.config.engine(),
          {.of = [this](uid_t uid) { return quotas_.WeightOf(uid); },
           .largest = quotas_.LargestWeight()})),
      sleeping_(loop, options_.config,
                [this](const std::string& name) { StartAwake(name); }) {}

void Supervisor::Start() {
  draining_ = HasDrainMarker(options_.config.state_dir());
  if (draining_) {
    const char* const text =
        "draining, as it was told before this start: `optctl drain --resume` "
        "ends it";
    spdlog::warn(text);
    if (!IsDrainingTold()) {
      observe::NoteNodeEvent(v1::EVENT_SEVERITY_WARNING, "drain_begun", text);
    }
  }
  spdlog::info("jobs share the cores by {}", shares_.description());
  for (const auto& [name, uid] : registry_.jobs()) {
    BeginAudience(name, uid);
    if (registry_.SleepFolder(name).empty()) {
      StartHost(name, uid);
    } else {
      sleeping_.Add(registry_.SleepPlaceOf(name));
    }
  }
  options_.kept.clear();  // segments of jobs that are gone
  NoteInterruptedSleeps();
}

void Supervisor::OnHello(UniqueFd fd, const accept::PeerCredentials& peer,
                         v1::Hello hello) {
  Waiting waiting;
  waiting.fd = std::move(fd);
  waiting.peer = peer;
  waiting.adopt.set_peer_uid(peer.caller.uid);
  waiting.adopt.set_peer_pid(peer.pid);
  const absl::StatusOr<uint32_t> version = accept::CheckHello(hello, peer);
  if (!version.ok()) {
    observe::LogOfPeer(spdlog::level::info, "session refused",
                       peer.quota_name(), "session of {} pid {} refused: {}",
                       peer.caller.name(), peer.pid,
                       version.status().ToString());
    accept::SendRefusal(waiting.fd.get(), version.status());
    return;
  }
  waiting.adopt.set_protocol_version(*version);
  *waiting.adopt.mutable_hello() = std::move(hello);
  const absl::Status status = Route(&waiting);
  if (!status.ok()) Refuse(waiting, status);
}

absl::Status Supervisor::Route(Waiting* waiting) {
  if (stopping_) {
    // The peer gets no answer: it connects again, perhaps to the next daemon.
    waiting->fd.reset();
    return absl::OkStatus();
  }
  // A peer without the role learns nothing of jobs, nor of the daemon's state.
  OPTSTATE_RETURN_IF_ERROR(CheckMayTrain(waiting->peer.caller));
  if (sleeping_.Has(waiting->adopt.hello().job())) {
    const std::string& name = waiting->adopt.hello().job();
    OPTSTATE_RETURN_IF_ERROR(CheckMayJoin(
        waiting->adopt.hello(), sleeping_.uid(name), waiting->peer.caller));
    return sleeping_.RefuseRank(name);
  }
  // A rank whose engine has died comes back to its open step: for existing
  // jobs, the engine distinguishes new ranks.
  if (draining_ && !hosts_.contains(waiting->adopt.hello().job())) {
    return absl::UnavailableError(
        "the daemon is draining and takes no new sessions");
  }
  OPTSTATE_ASSIGN_OR_RETURN(JobHost* const host, FindOrCreate(*waiting));
  return host->Adopt(waiting);
}

absl::StatusOr<JobHost*> Supervisor::FindOrCreate(const Waiting& waiting) {
  const v1::AdoptConnection& adopt = waiting.adopt;
  const std::string& name = adopt.hello().job();
  const auto found = hosts_.find(name);
  if (found != hosts_.end()) {
    OPTSTATE_RETURN_IF_ERROR(
        CheckMayJoin(adopt.hello(), found->second->uid(), waiting.peer.caller));
    OPTSTATE_RETURN_IF_ERROR(
        CheckRoomForSession(waiting.peer, found->second->uid()));
    return found->second.get();
  }
  if (adopt.hello().must_exist()) return NoJob(name);
  return CreateJob(waiting);
}

JobHost* Supervisor::StartHost(const std::string& name, uid_t uid,
                               bool is_new) {
  JobHost::Options options;
  options.executable = options_.executable;
  options.is_new = is_new;
  options.kept = std::move(options_.kept[name]);
  options_.kept.erase(name);
  options.config.set_job(name);
  options.config.set_uid(uid);
  options.config.set_job_dir(registry_.JobDirectory(name));
  *options.config.mutable_daemon() = options_.config;
  options.config.set_exit_with_supervisor(
      options_.engines_exit_with_supervisor);

  JobHost::Callbacks callbacks;
  callbacks.check_start = [this, name] { return registry_.CheckDisksOf(name); };
  callbacks.supervise = [this, uid] { return MakeSupervise(uid); };
  callbacks.on_engine = [this, name](UniqueFd grpc,
                                     const std::vector<uint64_t>& connections) {
    for (const uint64_t inode : connections) sessions_.Add(name, inode);
    callbacks_.on_engine(name, std::move(grpc));
    WakeEngineWaiters(name, hosts_.at(name)->engine_info().executable());
  };
  callbacks.on_failed = [this, name] {
    callbacks_.on_no_engine(name);
    WakeEngineWaiters(name, IsFailed(*hosts_.at(name)));
  };
  callbacks.on_process = [this, name, uid](pid_t pid) {
    const absl::Status applied = shares_.Apply(name, uid, pid);
    if (applied.ok()) return;
    observe::LogRepeated(spdlog::level::warn, "weight not in force", "jobs",
                         "job {}: its weight is not in force: {}", name,
                         applied.ToString());
  };
  callbacks.on_engine_gone = [this, name] {
    const absl::Status divided = shares_.Forget(name);
    if (!divided.ok()) {
      observe::LogRepeated(spdlog::level::warn, "cores not divided", "jobs",
                           "the cores are not divided by weights: {}",
                           divided.ToString());
    }
    sessions_.Forget(name);
    callbacks_.on_engine_gone(name);
  };
  callbacks.on_end_progress = [this] {
    if (on_stop_progress_ != nullptr) on_stop_progress_();
  };
  callbacks.on_adopted = [this, name](int fd) { OnAdopted(name, fd); };
  callbacks.on_hung_up = [this, name](int fd) {
    const absl::StatusOr<ino_t> inode = os::SocketInode(fd);
    if (inode.ok()) sessions_.Remove(name, *inode);
  };
  callbacks.on_stopped = [this, name](bool over) { OnStopped(name, over); };
  auto host = std::make_unique<JobHost>(loop_, std::move(options),
                                        std::move(callbacks));
  JobHost* const raw = host.get();
  hosts_[name] = std::move(host);
  callbacks_.on_engine_gone(name);  // none yet
  raw->Start();
  return raw;
}

v1::SupervisorRequest::Supervise Supervisor::MakeSupervise(uid_t owner) const {
  v1::SupervisorRequest::Supervise supervise;
  *supervise.mutable_limits() = limits();
  supervise.set_log_level(options_.config.log_level());
  supervise.set_draining(draining_);
  *supervise.mutable_quotas()->mutable_quotas() = quotas_.ThatMayConcern(owner);
  return supervise;
}

void Supervisor::OnAdopted(const std::string& name, int fd) {
  const absl::StatusOr<ino_t> inode = os::SocketInode(fd);
  if (inode.ok()) sessions_.Add(name, *inode);
}

void Supervisor::OnStopped(const std::string& name, bool over) {
  callbacks_.on_no_engine(name);
  const std::unique_ptr<JobHost> host =
      std::move(hosts_.extract(name).mapped());
  WakeEngineWaiters(name, NoJob(name));
  if (sleeping_.IsStopping(name) && OnStoppedToSleep(host.get(), over)) {
    return Reroute(host->TakeWaiting());
  }
  auto held = held_.extract(name);
  Held held_by = held.empty() ? Held{} : std::move(held.mapped());
  const bool is_delete = held_by.deletion != nullptr;
  if (over || is_delete) RemoveJob(name, host->uid(), std::move(held_by));
  // A job that could not be deleted goes on.
  const auto kept = registry_.jobs().find(name);
  if (is_delete && !stopping_ && kept != registry_.jobs().end()) {
    StartHost(name, kept->second);
  }
  Reroute(host->TakeWaiting());
  if (on_all_stopped_ != nullptr && hosts_.empty()) {
    std::exchange(on_all_stopped_, nullptr)();
  }
}

void Supervisor::RemoveJob(const std::string& name, uid_t owner, Held held) {
  auto progress = std::make_shared<os::RemovalProgress>();
  if (held.deletion != nullptr) {
    held.deletion->BeginRemoval();
    progress = std::shared_ptr<os::RemovalProgress>(held.deletion,
                                                    &held.deletion->removal());
  }
  const auto done = [events = JobEvents(name, owner),
                     held = std::move(held)](const absl::Status& status) {
    status.ok() ? events.Deleted(held.by) : events.NotDeleted(held.by, status);
    if (held.deletion != nullptr) held.deletion->End(status);
  };
  const auto paths = registry_.Discard(name);
  if (!paths.ok()) return done(paths.status());
  audience_.End(name);
  std::vector<os::TreeToRemove> trees;
  for (const std::string& path : *paths) {
    // The last one is that in memory, of which ranks may have mapped files.
    trees.push_back({path, /*may_be_mapped=*/&path == &paths->back()});
  }
  remover_.RemoveAll(std::move(trees), std::move(progress), done);
}

void Supervisor::Reroute(std::deque<Waiting> waiting) {
  for (Waiting& next : waiting) {
    const absl::Status status = Route(&next);
    if (!status.ok()) Refuse(next, status);
  }
}

void Supervisor::Stop(std::function<void()> done,
                      std::function<void()> on_progress) {
  stopping_ = true;
  sleeping_.Cancel();
  if (hosts_.empty()) return done();
  on_all_stopped_ = std::move(done);
  on_stop_progress_ = std::move(on_progress);
  for (const auto& [name, host] : hosts_) host->Stop();
}

KeptByJob Supervisor::Kept() const {
  KeptByJob kept;
  for (const auto& [name, host] : hosts_) {
    if (!host->kept().empty()) kept[name] = host->kept();
  }
  return kept;
}

void Supervisor::TellEnginesToStop() {
  for (const auto& [name, host] : hosts_) host->TellEngineToStop();
}

void Supervisor::RunInLoop(const std::function<void()>& function) {
  absl::Notification done;
  loop_->Post([&function, &done] {
    function();
    done.Notify();
  });
  done.WaitForNotification();
}

absl::Status Supervisor::SetDraining(bool draining) {
  absl::Status status;
  RunInLoop([this, draining, &status] {
    status = SetDrainMarker(options_.config.state_dir(), draining);
    if (!status.ok()) return;
    draining_ = draining;
    for (const auto& [name, host] : hosts_) host->SetDraining(draining);
  });
  return status;
}

std::vector<JobSummary> Supervisor::Jobs() {
  std::vector<JobSummary> jobs;
  RunInLoop([this, &jobs] {
    for (const auto& [name, host] : hosts_) {
      jobs.push_back(Summarize(*host));
      jobs.back().sleep = sleeping_.StateOf(name);
    }
    for (const std::string& name : sleeping_.Names()) {
      jobs.push_back(SummarizeSleeping(name));
    }
  });
  return jobs;
}

absl::StatusOr<JobSummary> Supervisor::FindJob(const std::string& name) {
  absl::StatusOr<JobSummary> job = NoJob(name);
  RunInLoop([this, &name, &job] {
    const auto found = hosts_.find(name);
    if (found != hosts_.end()) {
      job = Summarize(*found->second);
      job->sleep = sleeping_.StateOf(name);
    } else if (sleeping_.Has(name)) {
      job = SummarizeSleeping(name);
    }
  });
  return job;
}

absl::Status Supervisor::HoldJob(const std::string& name,
                                 const access::Caller& caller) {
  absl::Status status;
  RunInLoop([&] { status = HoldJobInLoop(name, caller); });
  return status;
}

absl::StatusOr<JobHost*> Supervisor::FindToChange(
    const std::string& name, const access::Caller& caller) {
  const auto found = hosts_.find(name);
  if (found == hosts_.end()) {
    if (!sleeping_.Has(name)) return NoJob(name);
    OPTSTATE_RETURN_IF_ERROR(CheckMayChange(name, sleeping_.uid(name), caller));
    return sleeping_.WhyNoEngine(name);
  }
  OPTSTATE_RETURN_IF_ERROR(CheckMayChange(name, found->second->uid(), caller));
  return found->second.get();
}

absl::Status Supervisor::RecoverJob(const std::string& name,
                                    const access::Caller& caller,
                                    pid_t failed_engine, bool to_durable) {
  absl::Status status;
  RunInLoop([&] {
    const absl::StatusOr<JobHost*> host = FindToChange(name, caller);
    status = host.ok() ? registry_.MakeMissingDirectory(name) : host.status();
    if (status.ok()) status = (*host)->Recover(failed_engine, to_durable);
    if (status.ok())
      JobEvents(name, (*host)->uid()).Recovering(caller.name(), to_durable);
  });
  return status;
}

void Supervisor::AddEngineWaiter(const std::string& name, EngineWaiter waiter) {
  const auto found = hosts_.find(name);
  if (found == hosts_.end()) return waiter(WhyNoHost(name));
  const JobHost& host = *found->second;
  switch (host.state()) {
    case JobHost::State::kRunning:
      return waiter(host.engine_info().executable());
    case JobHost::State::kFailed:
      return waiter(IsFailed(host));
    default:
      engine_waiters_.emplace(name, std::move(waiter));
  }
}

absl::Status Supervisor::HoldJobInLoop(const std::string& name,
                                       const access::Caller& caller) {
  if (sleeping_.Has(name)) {
    OPTSTATE_RETURN_IF_ERROR(CheckMayChange(name, sleeping_.uid(name), caller));
    OPTSTATE_RETURN_IF_ERROR(sleeping_.CheckIdle(name));
    if (held_.contains(name)) {
      return absl::UnavailableError(
          absl::StrCat("job \"", name, "\" is being deleted already"));
    }
    held_[name] = {.by = caller.name(), .deletion = nullptr};
    return absl::OkStatus();
  }
  OPTSTATE_ASSIGN_OR_RETURN(JobHost* const host, FindToChange(name, caller));
  OPTSTATE_RETURN_IF_ERROR(sleeping_.CheckIdle(name));
  if (held_.contains(name) || host->state() == JobHost::State::kStopping) {
    return absl::UnavailableError(
        absl::StrCat("job \"", name, "\" is being deleted or stopped already"));
  }
  held_[name] = {.by = caller.name(), .deletion = nullptr};
  host->SetHeld(true);
  return absl::OkStatus();
}

void Supervisor::ReleaseJob(const std::string& name) {
  RunInLoop([this, &name] {
    held_.erase(name);
    const auto found = hosts_.find(name);
    if (found != hosts_.end()) found->second->SetHeld(false);
  });
}

std::shared_ptr<JobDeletion> Supervisor::BeginDeletion(
    const std::string& name) {
  auto deletion = std::make_shared<JobDeletion>();
  RunInLoop([&] { BeginDeletionInLoop(name, deletion); });
  return deletion;
}

void Supervisor::BeginDeletionInLoop(
    const std::string& name, const std::shared_ptr<JobDeletion>& deletion) {
  // The job has ended by itself, and is removed. One that is there now is
  // another, perhaps of another user; but when the daemon ends it has ended the
  // engine of a job that is kept.
  const auto held = held_.find(name);
  if (held == held_.end() && stopping_ && registry_.jobs().contains(name)) {
    return deletion->End(absl::UnavailableError(
        absl::StrCat("the daemon ends, and job \"", name,
                     "\" is not deleted: delete it after the next start")));
  }
  // Others who hold that other job go on with it.
  if (held == held_.end() || held->second.deletion != nullptr ||
      sleeping_.IsStopping(name)) {
    return deletion->End(absl::OkStatus());
  }
  if (sleeping_.Has(name)) {
    const uid_t owner = sleeping_.uid(name);
    sleeping_.Forget(name);
    Held by_caller = std::move(held->second);
    held_.erase(held);
    by_caller.deletion = deletion;
    RemoveJob(name, owner, std::move(by_caller));
    // A job that could not be deleted sleeps on.
    if (registry_.jobs().contains(name)) {
      sleeping_.Add(registry_.SleepPlaceOf(name));
    }
    return;
  }
  const auto found = hosts_.find(name);
  if (found == hosts_.end()) return deletion->End(absl::OkStatus());
  held->second.deletion = deletion;
  found->second->Stop();
}

}  // namespace optstate::supervisor
