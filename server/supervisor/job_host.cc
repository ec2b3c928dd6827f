#include "server/supervisor/job_host.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/accept/refusal.h"
#include "server/engine/versions.h"
#include "server/observe/counters.h"
#include "server/observe/peer_log.h"
#include "server/supervisor/job_files.h"
#include "storage/state_folder.h"
#include "storage/tmpfs_info.h"

namespace optstate::supervisor {
namespace {

using observe::Count;
using observe::Counted;

// Interval of checks: no event reports that an engine has read a connection.
constexpr absl::Duration kLook = absl::Milliseconds(50);

// Explains why an engine cannot be started.
absl::Status ExplainShortage(const absl::Status& status,
                             const std::string& directory) {
  absl::Status full = storage::CheckNotFull(directory);
  if (!full.ok()) return full;
  return absl::ResourceExhaustedError(absl::StrCat(
      status.message(),
      ". Close sessions or delete jobs, or raise the daemon's limit (open "
      "files: ulimit -n; processes: ulimit -u and the cgroup's pids.max)"));
}

bool HasHungUp(int fd) {
  pollfd entry{fd, POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) == 1;
}

}  // namespace

JobHost::JobHost(os::EventLoop* loop, Options options, Callbacks callbacks)
    : loop_(loop),
      options_(std::move(options)),
      callbacks_(std::move(callbacks)),
      events_(options_.config.job(), options_.config.uid()),
      restart_policy_(
          options_.config.daemon().engine().restarts_max(),
          absl::Seconds(options_.config.daemon().engine().restart_window_s())),
      one_may_run_(!options_.is_new),
      kept_(std::move(options_.kept)) {}

JobHost::~JobHost() {
  loop_->Cancel(timer_);
  loop_->Cancel(look_timer_);
}

void JobHost::Start() { StartEngine(); }

EngineProcess::Callbacks JobHost::EngineCallbacks() {
  EngineProcess::Callbacks callbacks;
  callbacks.on_started = callbacks_.on_process;
  callbacks.on_ready = [this](const v1::EngineEvent::Ready& ready) {
    OnReady(ready);
  };
  callbacks.on_finished = [this] { OnFinished(); };
  callbacks.on_keep = [this](KeptSegment kept) {
    const uint32_t rank = kept.info.rank();
    told_.insert(rank);
    kept_.insert_or_assign(rank, std::move(kept));
  };
  callbacks.on_drop = [this](uint32_t rank) { kept_.erase(rank); };
  callbacks.on_working = [this](uint64_t bytes) { OnWorking(bytes); };
  callbacks.on_rank_lost = [this](const v1::EngineEvent::RankLost& lost) {
    OnRankLost(lost);
  };
  callbacks.on_writable = [this] { Pump(); };
  callbacks.on_exit = [this](const std::string& how) { OnExit(how); };
  return callbacks;
}

absl::StatusOr<std::unique_ptr<EngineProcess>> JobHost::AdoptRunning() {
  auto engine = EngineProcess::AdoptRunning(
      loop_, directory(), {callbacks_.supervise(), kept_}, EngineCallbacks());
  adopted_ = engine.ok();
  // Either no engine answers, or the engine is adopted now and its end will be
  // seen.
  if (engine.ok() || absl::IsUnavailable(engine.status())) one_may_run_ = false;
  return engine;
}

absl::StatusOr<std::unique_ptr<EngineProcess>> JobHost::StartNew() {
  OPTSTATE_RETURN_IF_ERROR(callbacks_.check_start());
  return EngineProcess::Start(loop_, options_.executable, options_.config,
                              {callbacks_.supervise(), kept_},
                              EngineCallbacks());
}

void JobHost::StartEngine() {
  state_ = State::kStarting;
  told_.clear();
  worked_bytes_ = 0;
  auto engine = AdoptRunning();
  if (absl::IsUnavailable(engine.status())) engine = StartNew();
  if (absl::IsResourceExhausted(engine.status()) && MayGiveUp()) {
    return GiveUp(ExplainShortage(engine.status(), directory()));
  }
  if (!engine.ok()) {
    events_.EngineNotStarted(engine.status().message());
    OnDeath(absl::StrCat("could not be started: ", engine.status().message()));
    return;
  }
  engine_ = *std::move(engine);
  Count(adopted_ ? Counted::kEngineAdopted : Counted::kEngineStarted);
  observe::LogRepeated(spdlog::level::info, "engine started",
                       absl::StrCat("job ", name()), "job {}: engine {} {}",
                       name(), engine_->pid(),
                       adopted_ ? "was found running" : "started");
  LimitStart();
}

void JobHost::LimitStart() {
  ArmTimer(options_.start_timeout, [this] {
    const auto time = absl::FormatDuration(options_.start_timeout);
    events_.EngineKilled(engine_->pid(), absl::StrCat("get ready in ", time));
    Count(Counted::kEngineKilled);
    engine_->Kill();
  });
}

// Gives the engine its time anew as long as it comes on: how long a job's
// records take is a matter of the disk, and a kill would lose all of it.
void JobHost::OnWorking(uint64_t disk_bytes) {
  if (disk_bytes <= worked_bytes_) return;
  worked_bytes_ = disk_bytes;
  if (state_ == State::kStarting) {
    reason_ = absl::StrFormat(
        "its engine reads its records from disk: %.1f GiB so far",
        static_cast<double>(disk_bytes) / (1 << 30));
    LimitStart();
  } else if (state_ == State::kStopping || state_ == State::kReplacing) {
    LimitStop();
    callbacks_.on_end_progress();
  }
}

void JobHost::OnReady(const v1::EngineEvent::Ready& ready) {
  if (state_ != State::kStarting) return;
  loop_->Cancel(timer_);
  state_ = State::kRunning;
  reason_.clear();
  engine_info_ = ready;
  if (adopted_) options_.config.set_restarts(ready.restarts());
  if (ready.control_version() < engine::kControlVersionMin ||
      ready.control_version() > engine::kControlVersion) {
    spdlog::warn(
        "job {}: engine {} is of optstated {} and speaks another language "
        "(control version {}, here {} to {}); replacing it",
        name(), engine_->pid(), ready.version(), ready.control_version(),
        engine::kControlVersionMin, engine::kControlVersion);
    return ReplaceRunning();
  }
  // The engine has reported all its gradients; sessions may have ended while no
  // supervisor was there.
  if (adopted_) {
    std::erase_if(kept_, [this](const auto& each) {
      return !told_.contains(each.first);
    });
  }
  events_.EngineReady(engine_->pid(), adopted_);
  if (adopted_) callbacks_.on_process(engine_->pid());
  callbacks_.on_engine(engine_->TakeGrpcFd(), {ready.connections().begin(),
                                               ready.connections().end()});
  Pump();
}

// Ranks of a job that drains, or whose engine ends, go because of that.
void JobHost::OnRankLost(const v1::EngineEvent::RankLost& lost) const {
  if (state_ != State::kRunning || callbacks_.supervise().draining()) return;
  events_.RankLost(lost.rank(), lost.committed_step(), lost.reason(),
                   lost.left_out());
}

void JobHost::OnFinished() {
  if (state_ != State::kRunning && state_ != State::kStarting &&
      state_ != State::kReplacing) {
    return;
  }
  events_.Over();
  over_ = true;
  StopEngine();
}

void JobHost::OnExit(const std::string& how) {
  const pid_t pid = engine_pid();
  engine_.reset();
  unread_.clear();
  loop_->Cancel(timer_);
  callbacks_.on_engine_gone();
  if (state_ == State::kStopping) {
    Count(Counted::kEngineStopped);
    spdlog::info("job {}: engine stopped", name());
    FinishStopping();
    return;
  }
  if (state_ == State::kReplacing) {
    Count(Counted::kEngineReplaced);
    spdlog::info("job {}: engine {} {}, starting the next", name(), pid, how);
    return StartEngine();
  }
  Count(Counted::kEngineDied);
  events_.EngineDied(pid, how);
  OnDeath(how);
}

void JobHost::OnDeath(const std::string& how) {
  reason_ = absl::StrCat("its engine ", how);
  const JobFiles files = FindJobFiles(directory());
  // No engine can be started without a directory.
  if (files == JobFiles::kGone) {
    return Fail(absl::StrCat(reason_, "; ", directory(), " was removed"));
  }
  const absl::Status full = storage::CheckNotFull(directory());
  if (!full.ok() && MayGiveUp()) return GiveUp(full);
  if (!full.ok()) absl::StrAppend(&reason_, "; ", full.message());
  const std::optional<absl::Duration> delay =
      restart_policy_.OnDeath(absl::Now());
  if (!delay.has_value()) {
    const v1::EngineSettings& settings = options_.config.daemon().engine();
    return Fail(absl::StrCat(reason_, "; it was restarted ",
                             settings.restarts_max(), " times within ",
                             settings.restart_window_s(),
                             " s, which is the limit"));
  }
  options_.config.set_restarts(options_.config.restarts() + 1);
  state_ = State::kBackingOff;
  ArmTimer(*delay, [this] { StartEngine(); });
}

void JobHost::Fail(const std::string& why) {
  state_ = State::kFailed;
  reason_ = why;
  events_.Failed(why, WhatIsKept(name(), directory(), DurableFolder()));
  RefuseWaiting(FailedStatus());
  callbacks_.on_failed();
}

std::string JobHost::DurableFolder() const {
  return FindDurableFolder(options_.config.daemon().nvme(), name());
}

bool JobHost::HasState() const {
  return FindJobFiles(directory()) == JobFiles::kState ||
         !DurableFolder().empty();
}

// Gives up a job without state, which would only be one more FAILED job for the
// user to delete.
void JobHost::GiveUp(const absl::Status& why) {
  given_up_ = absl::ResourceExhaustedError(absl::StrCat(
      "job \"", name(), "\": its engine cannot be started: ", why.message()));
  events_.GivenUp(why.message());
  RefuseWaiting(given_up_);
  over_ = true;
  StopEngine();
}

void JobHost::RefuseWaiting(const absl::Status& status) {
  for (const Waiting& waiting : std::exchange(waiting_, {})) {
    accept::SendRefusal(waiting.fd.get(), status);
  }
}

absl::Status JobHost::FailedStatus() const {
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", name(), "\" is FAILED: ", reason_, ". ",
                   WhatIsKept(name(), directory(), DurableFolder())));
}

absl::Status JobHost::Adopt(Waiting* waiting) {
  if (state_ == State::kFailed) return FailedStatus();
  if (!given_up_.ok()) return given_up_;
  if (waiting_.size() >= kWaitingMax) DropEnded();
  if (waiting_.size() >= kWaitingMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("job \"", name(), "\": ", waiting_.size(),
                     " connections already wait for its engine"));
  }
  waiting_.push_back(std::move(*waiting));
  Pump();
  LookLater();
  return absl::OkStatus();
}

void JobHost::SetDraining(bool draining) {
  if (engine_ != nullptr) engine_->SetDraining(draining);
}

void JobHost::SetHeld(bool held) {
  held_ = held;
  Pump();
}

void JobHost::Pump() {
  if (state_ != State::kRunning || held_) return;
  while (!waiting_.empty()) {
    Waiting& next = waiting_.front();
    const absl::Status status = engine_->Adopt(next.adopt, next.fd.get());
    // The engine takes none just now: on_writable, or the engine's death,
    // resumes this.
    if (absl::IsUnavailable(status)) return;
    if (status.ok()) {
      Count(Counted::kSessionHandedOver);
      callbacks_.on_adopted(next.fd.get());
      unread_.push_back(std::move(next.fd));
    } else {
      observe::LogOfPeer(
          spdlog::level::err, "session refused", next.peer.quota_name(),
          "job {}: connection refused: {}", name(), status.ToString());
      accept::SendRefusal(next.fd.get(), status);
    }
    waiting_.pop_front();
  }
}

void JobHost::LookLater() {
  if (looks_later_ || (waiting_.empty() && unread_.empty())) return;
  looks_later_ = true;
  look_timer_ = loop_->RunAfter(kLook, [this] {
    looks_later_ = false;
    DropEnded();
    LookLater();
  });
}

void JobHost::DropEnded() {
  if (engine_ == nullptr || !engine_->HasUnreadPackets()) unread_.clear();
  std::erase_if(unread_, [this](const UniqueFd& fd) {
    if (!HasHungUp(fd.get())) return false;
    callbacks_.on_hung_up(fd.get());
    return true;
  });
  const size_t gone = std::erase_if(
      waiting_, [](const Waiting& each) { return HasHungUp(each.fd.get()); });
  if (gone == 0) return;
  observe::LogRepeated(
      spdlog::level::info, "connections closed", absl::StrCat("job ", name()),
      "job {}: {} connections that waited for its engine were closed by their "
      "peers",
      name(), gone);
}

std::deque<Waiting> JobHost::TakeWaiting() {
  DropEnded();
  return std::move(waiting_);
}

// Leaves the next engine a note that it is to begin with what is on disk. The
// engine looks whether that is whole before it gives anything up.
absl::Status JobHost::AskForDurable() const {
  if (DurableFolder().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", name(),
        "\" has nothing durable on disk: it was made without a durability, or "
        "the disk of its nvme.directories is not mounted"));
  }
  const std::string note = directory() + storage::kToDurableFile;
  const UniqueFd made(
      ::open(note.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  return made.ok() ? absl::OkStatus()
                   : OsError(errno, absl::StrCat("create ", note));
}

absl::Status JobHost::Recover(pid_t failed_engine, bool to_durable) {
  // The caller may have asked the previous engine, whose answer says nothing
  // about this one.
  const bool fails_running = state_ == State::kRunning && failed_engine != 0 &&
                             engine_pid() == failed_engine;
  if (state_ != State::kFailed && !fails_running) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", name(),
        "\" has not failed: there is nothing to start again. `optctl describe "
        "job ",
        name(), "` says how it is"));
  }
  // Once the directory is restored, the call can be repeated.
  if (state_ == State::kFailed &&
      FindJobFiles(directory()) == JobFiles::kGone) {
    return FailedStatus();
  }
  if (to_durable) OPTSTATE_RETURN_IF_ERROR(AskForDurable());
  spdlog::info("job {}: starting its engine again{}, as it was asked for",
               name(), to_durable ? " at the last durable step" : "");
  restart_policy_.Reset();
  options_.config.set_restarts(0);
  reason_.clear();
  if (fails_running && to_durable) {
    // One that ends by itself makes its present step durable first.
    state_ = State::kReplacing;
    engine_->Kill();
  } else if (fails_running) {
    ReplaceRunning();
  } else {
    StartEngine();
  }
  return absl::OkStatus();
}

absl::Status JobHost::ReplaceEngine() {
  if (state_ != State::kRunning) {
    return absl::FailedPreconditionError(
        absl::StrCat("job \"", name(), "\" has no engine just now"));
  }
  ReplaceRunning();
  return absl::OkStatus();
}

void JobHost::ReplaceRunning() {
  state_ = State::kReplacing;
  engine_->Stop();
  LimitStop();
}

void JobHost::LimitStop() {
  ArmTimer(options_.stop_timeout, [this] {
    const auto time = absl::FormatDuration(options_.stop_timeout);
    events_.EngineKilled(engine_->pid(), absl::StrCat("stop in ", time));
    Count(Counted::kEngineKilled);
    engine_->Kill();
  });
}

void JobHost::Stop() {
  stops_as_told_ = true;
  StopEngine();
}

void JobHost::StopEngine() {
  if (state_ == State::kStopping) return;
  loop_->Cancel(timer_);
  state_ = State::kStopping;
  if (engine_ == nullptr && one_may_run_) {
    auto engine = AdoptRunning();
    if (engine.ok()) {
      engine_ = *std::move(engine);
    } else if (one_may_run_) {
      spdlog::error("job {}: an engine may run that cannot be told to stop: {}",
                    name(), engine.status().ToString());
    }
  }
  if (engine_ == nullptr) {
    ArmTimer(absl::ZeroDuration(), [this] { FinishStopping(); });
    return;
  }
  engine_->Stop();
  LimitStop();
}

void JobHost::FinishStopping() {
  const bool is_kept = over_ && !DurableFolder().empty();
  if (is_kept && !stops_as_told_) {
    over_ = false;
    given_up_ = absl::OkStatus();
    return Fail(
        "it ended by itself, and has durable files, which are removed "
        "on request alone");
  }
  const auto on_stopped = callbacks_.on_stopped;
  on_stopped(over_ && !is_kept);
}

void JobHost::ArmTimer(absl::Duration delay, std::function<void()> callback) {
  loop_->Cancel(timer_);
  timer_ = loop_->RunAfter(delay, std::move(callback));
}

}  // namespace optstate::supervisor
