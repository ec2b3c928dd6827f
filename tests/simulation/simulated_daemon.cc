#include "tests/simulation/simulated_daemon.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "proto/types/step_verdict.h"
#include "server/accept/hello_check.h"
#include "server/supervisor/job_events.h"
#include "server/supervisor/permissions.h"
#include "server/supervisor/user_limits.h"

namespace optstate::simulation {
namespace {

// The lease of a pause: the engine is ended at once.
constexpr absl::Duration kPauseLease = absl::Seconds(10);
// Stands for the pid of an engine, which is no process here.
constexpr pid_t kEnginePid = 1;

// A mutation that cannot be made must not be taken for one that is found.
void Require(bool holds, absl::string_view what, absl::string_view why) {
  if (holds) return;
  std::cerr << what << why << std::endl;
  std::abort();
}

absl::Status NoDaemon() {
  return absl::UnavailableError("no daemon listens, or its engine has ended");
}

}  // namespace

SimulatedDaemon::SimulatedDaemon(World* world, const TinyJob* tiny,
                                 NodeLog* log, Options options)
    : world_(*world),
      tiny_(*tiny),
      log_(*log),
      options_(std::move(options)),
      config_(tiny_.ConfigOf(options_.state_dir)) {}

absl::StatusOr<std::unique_ptr<SimulatedDaemon>> SimulatedDaemon::Start(
    World* world, const TinyJob* tiny, NodeLog* log, Options options) {
  std::unique_ptr<SimulatedDaemon> daemon(
      new SimulatedDaemon(world, tiny, log, std::move(options)));
  const NodeLog::Scope scope = daemon->LogHere();
  OPTSTATE_RETURN_IF_ERROR(daemon->StartSupervisor());
  return daemon;
}

absl::Status SimulatedDaemon::StartSupervisor() {
  OPTSTATE_ASSIGN_OR_RETURN(
      supervisor::JobRegistry registry,
      supervisor::JobRegistry::Open(absl::StrCat(options_.state_dir, "/jobs")));
  registry_.emplace(std::move(registry));
  sessions_ = supervisor::SessionLedger();
  looks_.emplace(world_.clock.AsFunction());
  restarts_.emplace(config_.engine().restarts_max(),
                    absl::Seconds(config_.engine().restart_window_s()));
  lines_.emplace(world_.clock.AsFunction());
  ++supervisor_;
  is_up_ = true;
  return absl::OkStatus();
}

void SimulatedDaemon::Connect(const accept::PeerCredentials& peer,
                              v1::Hello hello, uint64_t socket, Answer answer) {
  if (!is_up_) {
    world_.queue.After(world_.Draw(world_.model.local), Tag(EventKind::kHello),
                       [answer = std::move(answer)] { answer(NoDaemon()); });
    return;
  }
  open_.insert(socket);
  const absl::Time arrives =
      world_.queue.now() + world_.Draw(world_.model.local);
  loop_free_at_ =
      std::max(loop_free_at_, arrives) + world_.Draw(world_.model.hello);
  world_.queue.After(loop_free_at_ - world_.queue.now(), Tag(EventKind::kHello),
                     [this, peer, hello = std::move(hello), socket,
                      number = supervisor_, answer = std::move(answer)] {
                       // The connection ends with the process that had it.
                       if (!is_up_ || number != supervisor_) {
                         return answer(NoDaemon());
                       }
                       const NodeLog::Scope scope = LogHere();
                       Look(peer, hello, socket, answer);
                     });
}

void SimulatedDaemon::Look(const accept::PeerCredentials& peer,
                           const v1::Hello& hello, uint64_t socket,
                           const Answer& answer) {
  ++counts_.hellos;
  absl::Status status = accept::CheckHello(hello, peer).status();
  if (status.ok()) status = FindOrCreate(peer, hello);
  if (!status.ok()) {
    ++counts_.refused;
    Refuse(peer, hello, status);
    open_.erase(socket);
    return answer(status);
  }
  const Waiting waiting = {.socket = socket, .answer = answer};
  if (engine_state_ == EngineState::kRunning) return Adopt(waiting);
  waiting_.push_back(waiting);
}

absl::Status SimulatedDaemon::FindOrCreate(const accept::PeerCredentials& peer,
                                           const v1::Hello& hello) {
  OPTSTATE_RETURN_IF_ERROR(supervisor::CheckMayTrain(peer.caller));
  const auto found = registry_->jobs().find(hello.job());
  if (found != registry_->jobs().end()) {
    OPTSTATE_RETURN_IF_ERROR(supervisor::CheckMayJoinJob(
        hello.job(), found->second, registry_->AccessOf(hello.job()).access,
        peer.caller));
    return CheckRoomForSession(peer);
  }
  if (hello.must_exist()) return supervisor::NoJob(hello.job());
  OPTSTATE_RETURN_IF_ERROR(CheckRoomForSession(peer));
  OPTSTATE_RETURN_IF_ERROR(supervisor::CheckJobCount(
      config_.limits(), peer, {.of_user = 0, .all = registry_->jobs().size()}));
  OPTSTATE_RETURN_IF_ERROR(registry_->Create(hello.job(), peer.caller.uid));
  supervisor::JobEvents(hello.job(), peer.caller.uid).Created();
  StartEngine(absl::ZeroDuration());
  return absl::OkStatus();
}

// Does what Supervisor::CheckRoomForSession does. The look takes simulated
// time of the loop.
absl::Status SimulatedDaemon::CheckRoomForSession(
    const accept::PeerCredentials& peer) {
  const auto check = [&] {
    const size_t all = sessions_.count() + waiting_.size();
    return supervisor::CheckSessionCount(config_.limits(), peer,
                                         {.of_user = all, .all = all});
  };
  absl::Status status = check();
  if (status.ok()) return status;
  const std::string who = peer.quota_name();
  if (!peer.is_operator() && !looks_->MayLook(who)) return status;
  const absl::Duration took = world_.Draw(world_.model.look);
  loop_free_at_ = std::max(loop_free_at_, world_.queue.now()) + took;
  LookForEndedSessions();
  if (!peer.is_operator()) looks_->Charge(who, took);
  return check();
}

void SimulatedDaemon::LookForEndedSessions() {
  ++counts_.looks;
  std::erase_if(waiting_, [this](const Waiting& waiting) {
    return !open_.contains(waiting.socket);
  });
  sessions_.Retain(TinyJob::kName, open_);
}

void SimulatedDaemon::Refuse(const accept::PeerCredentials& peer,
                             const v1::Hello& hello,
                             const absl::Status& status) {
  LogOfPeer(
      "session refused", peer.quota_name(),
      absl::StrCat("session for job ", hello.job(), " of ", peer.caller.name(),
                   " pid ", peer.pid, " refused: ", status.ToString()));
}

void SimulatedDaemon::LogOfPeer(absl::string_view kind, absl::string_view peer,
                                const std::string& line) {
  const observe::LineLimiter::Verdict verdict = lines_->Judge(kind, peer);
  for (const std::string& text : verdict.left_out) spdlog::warn("{}", text);
  if (verdict.write) spdlog::info("{}", line);
}

void SimulatedDaemon::Adopt(const Waiting& waiting) {
  sessions_.Add(TinyJob::kName, waiting.socket);
  adopted_.push_back(waiting.socket);
  counts_.sessions_max =
      std::max<uint64_t>(counts_.sessions_max, sessions_.count());
  waiting.answer(absl::OkStatus());
}

void SimulatedDaemon::StartEngine(absl::Duration delay) {
  engine_state_ = EngineState::kStarting;
  world_.queue.After(delay + world_.Draw(world_.model.engine_start),
                     Tag(EventKind::kEngine), [this] {
                       if (is_lost_) return;
                       const NodeLog::Scope scope = LogHere();
                       OpenJob();
                     });
}

void SimulatedDaemon::NoteDecision() {
  if (options_.mutation != Mutation::kForgetsDecisions || job_ == nullptr) {
    return;
  }
  // Other ranks bring the same decision later.
  const absl::StatusOr<session::JobPosition> position = job_->Position();
  if (!position.ok() || !position->prepared.has_value()) return;
  std::error_code error;
  std::filesystem::remove_all(undecided_directory(), error);
  if (!error) {
    std::filesystem::copy(registry_->JobDirectory(TinyJob::kName),
                          undecided_directory(),
                          std::filesystem::copy_options::recursive, error);
  }
  Require(!error, "the files of a job cannot be copied: ", error.message());
}

void SimulatedDaemon::RestoreUndecided() {
  if (options_.mutation != Mutation::kForgetsDecisions) return;
  std::error_code error;
  if (!std::filesystem::exists(undecided_directory(), error)) return;
  const std::string directory = registry_->JobDirectory(TinyJob::kName);
  std::filesystem::remove_all(directory, error);
  if (!error) {
    std::filesystem::rename(undecided_directory(), directory, error);
  }
  Require(!error, "the files of a job cannot be replaced: ", error.message());
}

void SimulatedDaemon::ForgetPreparedStep() {
  if (options_.mutation != Mutation::kForgetsPreparedSteps) return;
  const absl::StatusOr<session::JobPosition> position = job_->Position();
  if (!position.ok() || !position->prepared.has_value()) return;
  // Where this is refused the step stays, as on a node that is not broken.
  job_->DecideUnattached({.step = position->prepared->step,
                          .digest = position->prepared->digest,
                          .verdict = Verdict::kAbort})
      .status()
      .IgnoreError();
}

void SimulatedDaemon::OpenJob() {
  RestoreUndecided();
  session::Job::Options options;
  options.name = TinyJob::kName;
  options.uid = options_.owner;
  options.directory = registry_->JobDirectory(TinyJob::kName);
  options.config = config_;
  options.clock = world_.clock.AsFunction();
  options.wall_clock = world_.clock.AsFunction();
  absl::StatusOr<std::unique_ptr<session::Job>> job =
      session::Job::Open(std::move(options));
  if (!job.ok()) {
    failure_.Update(Annotate(
        job.status(), absl::StrCat("node ", options_.node, ": its engine")));
    return;
  }
  job_ = *std::move(job);
  ForgetPreparedStep();
  ++engine_;
  ++counts_.engines;
  engine_state_ = EngineState::kRunning;
  engine_free_at_ = world_.queue.now();
  supervisor::JobEvents(TinyJob::kName, options_.owner)
      .EngineReady(kEnginePid, /*adopted=*/false);
  for (const Waiting& waiting : std::exchange(waiting_, {})) Adopt(waiting);
}

absl::Duration SimulatedDaemon::QueueInEngine(const DrawnTime& time) {
  engine_free_at_ =
      std::max(engine_free_at_, world_.queue.now()) + world_.Draw(time);
  return engine_free_at_ - world_.queue.now();
}

void SimulatedDaemon::NoteAttached(uint32_t rank, uint64_t socket,
                                   std::function<void()> on_lost) {
  on_lost_[rank] = std::move(on_lost);
  LogOfPeer("session attached", absl::StrCat("uid ", options_.owner),
            absl::StrCat("session attached: job=", TinyJob::kName,
                         " rank=", rank, " socket=", socket));
}

void SimulatedDaemon::EndSession(uint32_t rank, uint64_t engine,
                                 bool for_good) {
  if (job_ == nullptr || engine != engine_) return;
  for_good ? job_->Leave(rank) : job_->Detach(rank);
  on_lost_.erase(rank);
  LogOfPeer(
      "session detached", absl::StrCat("uid ", options_.owner),
      absl::StrCat("session detached: job=", TinyJob::kName, " rank=", rank));
}

bool SimulatedDaemon::TryPause() {
  // The deadline is one of real time, which is over: the job only looks.
  return job_ != nullptr && job_->Pause(absl::InfinitePast(), kPauseLease).ok();
}

void SimulatedDaemon::EndEngine() {
  engine_state_ = EngineState::kNone;
  job_.reset();  // its files stay
  sessions_.Forget(TinyJob::kName);
  for (const ino_t socket : std::exchange(adopted_, {})) open_.erase(socket);
  for (auto& [rank, on_lost] : std::exchange(on_lost_, {})) {
    world_.queue.After(
        world_.Draw(world_.model.local),
        {.kind = EventKind::kLocal, .node = options_.node, .rank = rank},
        std::move(on_lost));
  }
}

void SimulatedDaemon::Upgrade() {
  if (job_ == nullptr) return;
  job_->Stop();
  EndEngine();
  is_up_ = false;
  open_.clear();
  for (const Waiting& waiting : std::exchange(waiting_, {})) {
    waiting.answer(NoDaemon());
  }
  world_.queue.After(world_.Draw(world_.model.engine_start),
                     Tag(EventKind::kEngine), [this] {
                       if (is_lost_) return;
                       const NodeLog::Scope scope = LogHere();
                       failure_.Update(StartSupervisor());
                       if (failure_.ok()) StartEngine(absl::ZeroDuration());
                     });
}

void SimulatedDaemon::KillEngine() {
  if (job_ == nullptr) return;
  EndEngine();
  supervisor::JobEvents(TinyJob::kName, options_.owner)
      .EngineDied(kEnginePid, "was killed by signal 9");
  const std::optional<absl::Duration> delay =
      restarts_->OnDeath(world_.queue.now());
  if (!delay.has_value()) {
    failure_.Update(absl::InternalError(absl::StrCat(
        "node ", options_.node, ": an engine is given up after one death")));
    return;
  }
  StartEngine(*delay);
}

void SimulatedDaemon::Lose() {
  is_lost_ = true;
  is_up_ = false;
  engine_state_ = EngineState::kNone;
  job_.reset();
  on_lost_.clear();
  waiting_.clear();
  open_.clear();
  std::error_code ignored;
  std::filesystem::remove_all(options_.state_dir, ignored);
}

}  // namespace optstate::simulation
