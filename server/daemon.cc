#include "server/daemon.h"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/cpu/targets.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "proto/types/version.h"
#include "server/admin/admin_server.h"
#include "server/admin/admin_service.h"
#include "server/admin/engine_channels.h"
#include "server/admin/server_info.h"
#include "server/admin/upgrade_control.h"
#include "server/build_check.h"
#include "server/engine_replacement.h"
#include "server/handover.h"
#include "server/observe/peer_log.h"
#include "server/observe/sd_notify.h"
#include "server/scheduler/available_cores.h"
#include "server/scheduler/memory_bandwidth.h"
#include "server/scheduler/memory_bandwidth_record.h"
#include "server/supervisor/acceptor.h"
#include "server/supervisor/event_loop.h"
#include "server/supervisor/handshake.h"
#include "server/supervisor/listener.h"
#include "server/supervisor/private_directory.h"
#include "server/supervisor/signals.h"
#include "server/supervisor/state_directory.h"
#include "server/supervisor/supervisor.h"
#include "server/upgrade_record.h"

namespace optstate {
namespace {

using supervisor::Acceptor;
using supervisor::EventLoop;
using supervisor::Handshakes;
using supervisor::Listener;
using supervisor::PeerCredentials;
using supervisor::SignalWatch;
using supervisor::StateDirectory;
using supervisor::Supervisor;

// Grace for admin calls that run when the daemon ends.
constexpr absl::Duration kCallsEnd = absl::Seconds(1);
constexpr absl::Duration kTellOfLinesEvery = absl::Seconds(10);

// Raises the limit of fds: each session and each gRPC connection takes one.
void RaiseFdLimit() {
  rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

// Warns if fds may run out. An engine takes three: its control socket, its
// process and its gRPC connection.
void WarnOfFewFds(const v1::Limits& limits) {
  rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const uint64_t needed =
      3 * uint64_t{limits.jobs_max()} + limits.sessions_max();
  if (limit.rlim_cur >= needed) return;
  spdlog::warn(
      "the limit of open files is {}, and limits.jobs_max {} and "
      "limits.sessions_max {} may need {}: raise it (ulimit -n, LimitNOFILE=), "
      "or lower them; new jobs and sessions are refused when none is left",
      limit.rlim_cur, limits.jobs_max(), limits.sessions_max(), needed);
}

// Reaps engines that died while this build was being executed: they are
// children of the process, and no EngineProcess knows them. Called before any
// EngineProcess exists.
void ReapTheDead() {
  while (::waitpid(-1, nullptr, WNOHANG) > 0) {
  }
}

void Notify(absl::string_view state) {
  const absl::Status status = observe::NotifyServiceManager(state);
  if (!status.ok()) spdlog::warn("{}", status.ToString());
}

std::vector<std::string> Addresses(const v1::DaemonConfig& config) {
  std::vector<std::string> addresses = {"unix:" + config.socket()};
  addresses.insert(addresses.end(), config.listen().begin(),
                   config.listen().end());
  return addresses;
}

using Listeners = std::map<std::string, std::unique_ptr<Listener>>;

// Returns the listeners that the process had before its upgrade, by address,
// without those that are no longer configured.
absl::StatusOr<Listeners> Inherit(const v1::SupervisorHandover& handover,
                                  const std::vector<std::string>& configured,
                                  mode_t mode) {
  Listeners listeners;
  for (const auto& one : handover.listeners()) {
    OPTSTATE_ASSIGN_OR_RETURN(const supervisor::ListenAddress address,
                              supervisor::ParseListenAddress(one.address()));
    if (!absl::c_linear_search(configured, one.address())) {
      Listener::Retire(address, UniqueFd(one.fd()), UniqueFd(one.lock_fd()));
      continue;
    }
    OPTSTATE_ASSIGN_OR_RETURN(listeners[one.address()],
                              Listener::Inherit(address, UniqueFd(one.fd()),
                                                UniqueFd(one.lock_fd()), mode));
  }
  return listeners;
}

// Opens or inherits the listeners, in the order of Addresses().
absl::StatusOr<std::vector<std::unique_ptr<Listener>>> OpenListeners(
    const v1::DaemonConfig& config,
    const std::optional<v1::SupervisorHandover>& handover) {
  const auto mode = static_cast<mode_t>(config.socket_mode());
  Listeners inherited;
  if (handover.has_value()) {
    OPTSTATE_ASSIGN_OR_RETURN(inherited,
                              Inherit(*handover, Addresses(config), mode));
  }
  std::vector<std::unique_ptr<Listener>> listeners;
  for (const std::string& text : Addresses(config)) {
    auto found = inherited.extract(text);
    if (!found.empty()) {
      listeners.push_back(std::move(found.mapped()));
      continue;
    }
    OPTSTATE_ASSIGN_OR_RETURN(const supervisor::ListenAddress address,
                              supervisor::ParseListenAddress(text));
    OPTSTATE_ASSIGN_OR_RETURN(auto listener, Listener::Open(address, mode));
    listeners.push_back(std::move(listener));
  }
  return listeners;
}

std::map<std::string, supervisor::KeptSegments> InheritKept(
    const std::optional<v1::SupervisorHandover>& handover) {
  std::map<std::string, supervisor::KeptSegments> kept;
  if (!handover.has_value()) return kept;
  for (const auto& one : handover->kept()) {
    kept[one.job()][one.gradients().rank()] = {
        one.gradients(), std::make_shared<const UniqueFd>(one.fd())};
  }
  return kept;
}

std::string NewUpgradeId() {
  absl::BitGen random;
  return absl::StrCat(absl::Hex(
      absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1, UINT64_MAX)));
}

uint32_t WorkersOf(const v1::DaemonConfig& config) {
  return config.engine().workers() != 0
             ? config.engine().workers()
             : static_cast<uint32_t>(AvailableCores());
}

admin::ServerInfo DescribeServer(
    const v1::DaemonConfig& config, const std::string& pages,
    const std::vector<std::unique_ptr<Listener>>& listeners) {
  admin::ServerInfo info;
  info.started_at = absl::Now();
  info.state_dir = config.state_dir();
  info.socket = config.socket();
  for (size_t i = 1; i < listeners.size(); ++i) {
    info.listen.push_back(listeners[i]->name());
  }
  info.huge_pages = pages;
  info.instruction_set = cpu::TargetName(cpu::BestTarget());
  info.workers = WorkersOf(config);
  info.limits = config.limits();
  return info;
}

void LogStart(const admin::ServerInfo& info) {
  spdlog::info("optstated {} starts", std::string(kVersion));
  spdlog::info("state directory {}: {}", info.state_dir, info.huge_pages);
  spdlog::info("listening on unix:{}{}{}", info.socket,
               info.listen.empty() ? "" : ", ",
               absl::StrJoin(info.listen, ", "));
  for (const std::string& address : info.listen) {
    if (absl::StartsWith(address, "unix:")) continue;
    spdlog::warn(
        "{}: TCP has no users and no TLS: whoever reaches it, every local user "
        "of loopback too, may use and delete every job",
        address);
  }
  spdlog::info("{} workers per engine, instruction set {}", info.workers,
               info.instruction_set);
}

// The running daemon. Members are in the order in which they are built; each
// uses only those above it.
class Daemon : private admin::UpgradeControl {
 public:
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(DaemonOptions options);
  ~Daemon() override;

  void Run() { loop_->Run(); }

 private:
  // The build that is to take over.
  struct NextBuild {
    std::string path;
    bool replace_all = false;  // engines of this build too
    std::string id;
    v1::DaemonConfig config;
    // Listeners of the next build that this one does not have.
    std::shared_ptr<const Listeners> listeners;
  };

  Daemon(DaemonOptions options, std::unique_ptr<EventLoop> loop,
         StateDirectory state);

  absl::Status Build();
  absl::Status BuildAdmin(
      const std::vector<std::unique_ptr<Listener>>& listeners);
  absl::Status WatchLifeline();
  void OnGrpc(UniqueFd fd, const PeerCredentials& peer);
  void OnSignal(int signal);
  // Logs the counts of suppressed lines from time to time.
  void TellOfLinesLeftOut();

  absl::StatusOr<v1::UpgradeReply> Upgrade(const std::string& binary) override;
  v1::UpgradeProgress upgrade_progress() override { return upgrade_.Get(); }
  absl::StatusOr<v1::DaemonConfig> ConfigForUpgrade() const;
  absl::StatusOr<Listeners> OpenMissing(const v1::DaemonConfig& config) const;
  void UpgradeAtHangup();
  absl::StatusOr<NextBuild> CheckInstalledBuild() const;
  absl::Status BeginUpgrade(NextBuild next);
  void FinishUpgrade(const NextBuild& next);
  v1::SupervisorHandover MakeHandover(const NextBuild& next) const;
  absl::Status RestartAdmin();

  void BeginEnd(const std::string& why, absl::Duration patience);
  void RestAndStop(absl::Duration patience);

  DaemonOptions options_;
  const std::unique_ptr<EventLoop> loop_;
  StateDirectory state_;
  admin::EngineChannels engines_;
  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<admin::AdminService> admin_service_;
  std::unique_ptr<admin::AdminServer> admin_server_;
  std::unique_ptr<Handshakes> handshakes_;
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<SignalWatch> signals_;
  UniqueFd lifeline_;
  UpgradeRecord upgrade_;
  std::optional<EngineReplacement> replacement_;
  bool checking_ = false;   // upgrade_thread_ checks a build
  bool upgrading_ = false;  // reverted only by a failure to execute
  int signal_while_upgrading_ = 0;
  bool ending_ = false;
  std::optional<MemoryBandwidthMeter> meter_;
  std::thread upgrade_thread_;
  std::thread rest_;
};

// Removes a private daemon's files: such a daemon leaves nothing behind.
void RemoveTraces(const v1::DaemonConfig& config) {
  const absl::Status status = supervisor::RemoveTree(config.state_dir());
  if (!status.ok()) spdlog::warn("{}", status.ToString());
  (void)::unlink((config.socket() + ".lock").c_str());
}

Daemon::Daemon(DaemonOptions options, std::unique_ptr<EventLoop> loop,
               StateDirectory state)
    : options_(std::move(options)),
      loop_(std::move(loop)),
      state_(std::move(state)),
      lifeline_(options_.lifeline_fd) {}

Daemon::~Daemon() {
  if (upgrade_thread_.joinable()) upgrade_thread_.join();
  if (rest_.joinable()) rest_.join();
  if (lifeline_.ok()) loop_->Unwatch(lifeline_.get());
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(DaemonOptions options) {
  OPTSTATE_ASSIGN_OR_RETURN(auto loop, EventLoop::Create());
  UniqueFd lock(options.handover.has_value() ? options.handover->state_lock_fd()
                                             : -1);
  OPTSTATE_ASSIGN_OR_RETURN(
      StateDirectory state,
      StateDirectory::Open(options.config, std::move(lock)));
  std::unique_ptr<Daemon> daemon(
      new Daemon(std::move(options), std::move(loop), std::move(state)));
  OPTSTATE_RETURN_IF_ERROR(daemon->Build());
  return daemon;
}

absl::Status Daemon::Build() {
  const v1::DaemonConfig& config = options_.config;
  OPTSTATE_ASSIGN_OR_RETURN(auto listeners,
                            OpenListeners(config, options_.handover));
  OPTSTATE_ASSIGN_OR_RETURN(
      signals_, SignalWatch::Start(loop_.get(),
                                   [this](int signal) { OnSignal(signal); }));
  OPTSTATE_RETURN_IF_ERROR(WatchLifeline());

  supervisor_ = std::make_unique<Supervisor>(
      loop_.get(),
      Supervisor::Options{config, options_.executable, lifeline_.ok(),
                          InheritKept(options_.handover),
                          [this] { return state_.CheckInPlace(); }},
      state_.TakeRegistry(),
      Supervisor::Callbacks{
          [this](const std::string& job, UniqueFd grpc) {
            engines_.Set(job, std::move(grpc));
          },
          [this](const std::string& job) { engines_.Lose(job); },
          [this](const std::string& job) { engines_.Erase(job); }});
  OPTSTATE_RETURN_IF_ERROR(BuildAdmin(listeners));

  handshakes_ = std::make_unique<Handshakes>(
      loop_.get(), absl::Milliseconds(config.limits().handshake_timeout_ms()),
      Handshakes::Callbacks{
          [this](UniqueFd fd, const PeerCredentials& peer, v1::Hello hello) {
            supervisor_->OnHello(std::move(fd), peer, std::move(hello));
          },
          [this](UniqueFd fd, const PeerCredentials& peer) {
            OnGrpc(std::move(fd), peer);
          },
          [this](UniqueFd fd, const absl::Status& why) {
            admin_server_->Refuse(std::move(fd), why);
          }});
  acceptor_ = std::make_unique<Acceptor>(
      loop_.get(), std::move(listeners),
      [this](UniqueFd fd, const PeerCredentials& peer) {
        handshakes_->Start(std::move(fd), peer);
      });
  // A trainer's private daemon has a new state directory each time.
  if (!lifeline_.ok()) {
    WarnOfFewFds(config.limits());
    meter_.emplace(config.state_dir(), static_cast<int>(WorkersOf(config)),
                   MeasureMemoryBandwidth);
  }
  // Engines are started first: they take longest.
  supervisor_->Start();
  OPTSTATE_RETURN_IF_ERROR(acceptor_->Start());
  if (options_.handover.has_value()) {
    upgrade_.Begin(options_.handover->upgrade_id());
    replacement_.emplace(
        EngineReplacement::Options{supervisor_.get(), &engines_, &upgrade_,
                                   options_.handover->replace_all(),
                                   absl::Seconds(config.drain_timeout_s())});
  }
  TellOfLinesLeftOut();
  Notify("READY=1");
  return absl::OkStatus();
}

absl::Status Daemon::BuildAdmin(
    const std::vector<std::unique_ptr<Listener>>& listeners) {
  admin::ServerInfo info =
      DescribeServer(options_.config, state_.pages(), listeners);
  LogStart(info);
  admin_service_ = std::make_unique<admin::AdminService>(
      supervisor_.get(), &engines_, static_cast<admin::UpgradeControl*>(this),
      std::move(info));
  return RestartAdmin();
}

absl::Status Daemon::RestartAdmin() {
  admin::AdminServer::Limits limits;
  limits.connections_of_user =
      options_.config.limits().user_grpc_connections_max();
  OPTSTATE_ASSIGN_OR_RETURN(
      admin_server_, admin::AdminServer::Start(admin_service_.get(), limits));
  return absl::OkStatus();
}

absl::Status Daemon::WatchLifeline() {
  if (!lifeline_.ok()) return absl::OkStatus();
  return loop_->Watch(lifeline_.get(), EPOLLIN, [this](uint32_t) {
    char ignored[64];
    if (::read(lifeline_.get(), ignored, sizeof(ignored)) > 0) return;
    loop_->Unwatch(lifeline_.get());
    // No rank is left that could finish a step.
    BeginEnd("the trainer has ended", absl::ZeroDuration());
  });
}

void Daemon::OnGrpc(UniqueFd fd, const PeerCredentials& peer) {
  const absl::Status status = admin_server_->Serve(
      std::move(fd), {.uid = peer.uid, .is_local = peer.is_unix},
      peer.quota_name());
  if (!status.ok()) {
    observe::LogOfPeer(spdlog::level::warn, "gRPC connection refused",
                       peer.quota_name(),
                       "gRPC connection of uid {} pid {} refused: {}", peer.uid,
                       peer.pid, status.ToString());
  }
}

void Daemon::TellOfLinesLeftOut() {
  observe::LogLeftOut();
  loop_->RunAfter(kTellOfLinesEvery, [this] { TellOfLinesLeftOut(); });
}

void Daemon::OnSignal(int signal) {
  if (signal == SIGHUP) return UpgradeAtHangup();
  if (upgrading_) {
    signal_while_upgrading_ = signal;
    return;
  }
  if (ending_) {
    spdlog::warn("signal {} again: ending at once", signal);
    supervisor_->TellEnginesToStop();
    if (lifeline_.ok()) RemoveTraces(options_.config);
    ::_exit(128 + signal);
  }
  BeginEnd(absl::StrCat("signal ", signal),
           absl::Seconds(options_.config.drain_timeout_s()));
}

absl::StatusOr<v1::UpgradeReply> Daemon::Upgrade(const std::string& binary) {
  if (lifeline_.ok()) {
    return absl::FailedPreconditionError(
        "a trainer's private daemon is not upgraded: restart the trainer");
  }
  NextBuild next;
  next.path = binary;
  next.replace_all = true;
  next.id = NewUpgradeId();
  if (binary.empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(next.path, OwnPath());
  }
  OPTSTATE_ASSIGN_OR_RETURN(next.config, ConfigForUpgrade());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::FormatVersions versions,
                            CheckBuild(next.path, options_.arguments));
  absl::Status begun;
  absl::Notification done;
  loop_->Post([&] {
    begun = BeginUpgrade(next);
    done.Notify();
  });
  done.WaitForNotification();
  OPTSTATE_RETURN_IF_ERROR(begun);
  v1::UpgradeReply reply;
  reply.set_version(versions.version());
  reply.set_id(next.id);
  return reply;
}

// Converts an error in the configuration: the caller's own request is neither
// invalid nor for a missing object.
absl::Status AsRefusal(const absl::Status& status) {
  if (!absl::IsInvalidArgument(status) && !absl::IsNotFound(status)) {
    return status;
  }
  return absl::FailedPreconditionError(status.message());
}

// Reads the next build's configuration. One that names another place, or mounts
// one, would leave the jobs behind.
absl::StatusOr<v1::DaemonConfig> Daemon::ConfigForUpgrade() const {
  OPTSTATE_RETURN_IF_ERROR(state_.CheckInPlace());
  absl::StatusOr<v1::DaemonConfig> reloaded = options_.reload();
  if (!reloaded.ok()) return AsRefusal(reloaded.status());
  v1::DaemonConfig& config = *reloaded;
  const v1::DaemonConfig& own = options_.config;
  if (config.state_dir() != own.state_dir() ||
      config.socket() != own.socket()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the configuration names state_dir ", config.state_dir(),
                     " and socket ", config.socket(), ", the daemon runs with ",
                     own.state_dir(), " and ", own.socket(),
                     ": stop it and start it again for that"));
  }
  if (absl::StrJoin(config.nvme().directories(), ":") !=
      absl::StrJoin(own.nvme().directories(), ":")) {
    return absl::FailedPreconditionError(
        absl::StrCat("the configuration names nvme.directories ",
                     absl::StrJoin(config.nvme().directories(), ", "),
                     ", the daemon runs with ",
                     absl::StrJoin(own.nvme().directories(), ", "),
                     ": stop it and start it again for that"));
  }
  if (config.huge_pages() == v1::HUGE_PAGES_MOUNT &&
      own.huge_pages() != v1::HUGE_PAGES_MOUNT) {
    return absl::FailedPreconditionError(
        "huge_pages: mount would hide the jobs that there are: stop the daemon "
        "and start it again for that");
  }
  return config;
}

absl::StatusOr<Listeners> Daemon::OpenMissing(
    const v1::DaemonConfig& config) const {
  const auto mode = static_cast<mode_t>(config.socket_mode());
  const std::vector<std::string> own = Addresses(options_.config);
  Listeners opened;
  for (const std::string& text : Addresses(config)) {
    const auto found = std::find(own.begin(), own.end(), text);
    std::unique_ptr<Listener> listener;
    if (found == own.end()) {
      OPTSTATE_ASSIGN_OR_RETURN(const supervisor::ListenAddress address,
                                supervisor::ParseListenAddress(text));
      OPTSTATE_ASSIGN_OR_RETURN(listener, Listener::Open(address, mode));
    } else {
      OPTSTATE_ASSIGN_OR_RETURN(
          listener,
          acceptor_->listeners()[found - own.begin()]->Reopened(mode));
    }
    if (listener != nullptr) opened[text] = std::move(listener);
  }
  return opened;
}

void Daemon::UpgradeAtHangup() {
  if (lifeline_.ok()) {
    spdlog::info("SIGHUP ignored: this daemon goes with its trainer");
    return;
  }
  if (checking_ || upgrading_ || ending_ || upgrade_.under_way()) {
    spdlog::warn("SIGHUP ignored: the daemon is being upgraded or ends");
    return;
  }
  checking_ = true;
  if (upgrade_thread_.joinable()) upgrade_thread_.join();
  // Runs on a thread of its own, because it executes the build that is to take
  // over.
  upgrade_thread_ = std::thread([this] {
    const absl::StatusOr<NextBuild> next = CheckInstalledBuild();
    loop_->Post([this, next] {
      checking_ = false;
      const absl::Status begun =
          next.ok() ? BeginUpgrade(*next) : next.status();
      if (begun.ok()) return;
      spdlog::error("SIGHUP: everything stays as it is: {}", begun.ToString());
    });
  });
}

absl::StatusOr<Daemon::NextBuild> Daemon::CheckInstalledBuild() const {
  NextBuild next;
  next.id = NewUpgradeId();
  OPTSTATE_ASSIGN_OR_RETURN(next.path, OwnPath());
  OPTSTATE_ASSIGN_OR_RETURN(next.config, ConfigForUpgrade());
  OPTSTATE_RETURN_IF_ERROR(CheckBuild(next.path, options_.arguments).status());
  return next;
}

absl::Status Daemon::BeginUpgrade(NextBuild next) {
  if (ending_) return absl::UnavailableError("the daemon ends");
  if (checking_ || upgrading_ || upgrade_.under_way()) {
    return absl::UnavailableError("the daemon is being upgraded already");
  }
  // Listeners are opened here, where a failure to open one loses nothing yet.
  absl::StatusOr<Listeners> missing = OpenMissing(next.config);
  if (!missing.ok()) return AsRefusal(missing.status());
  next.listeners = std::make_shared<const Listeners>(*std::move(missing));
  upgrading_ = true;
  // Calls from now on, before the next build runs, see this upgrade.
  upgrade_.Begin(next.id);
  spdlog::info("upgrading to {}", next.path);
  // Connections from now on wait for the next build.
  acceptor_->Hold();
  if (upgrade_thread_.joinable()) upgrade_thread_.join();
  upgrade_thread_ = std::thread([this, next = std::move(next)] {
    // The call that requested this is answered first.
    admin_server_->Shutdown(absl::Now() + kCallsEnd);
    loop_->Post([this, next] { FinishUpgrade(next); });
  });
  return absl::OkStatus();
}

v1::SupervisorHandover Daemon::MakeHandover(const NextBuild& next) const {
  v1::SupervisorHandover handover;
  std::map<std::string, v1::SupervisorHandover::Listener> listeners;
  const auto add = [&listeners](const std::string& address,
                                const Listener& listener) {
    const bool is_new = !listeners.contains(address);
    v1::SupervisorHandover::Listener& one = listeners[address];
    one.set_address(address);
    one.set_fd(listener.fd());
    // A reopened listener uses the lock of the previous one.
    if (is_new || listener.lock_fd() >= 0) one.set_lock_fd(listener.lock_fd());
  };
  const std::vector<std::string> addresses = Addresses(options_.config);
  for (size_t i = 0; i < addresses.size(); ++i) {
    add(addresses[i], *acceptor_->listeners()[i]);
  }
  // Reopened listeners also replace those that clients cannot reach any more.
  for (const auto& [address, listener] : *next.listeners) {
    add(address, *listener);
  }
  for (const auto& [address, one] : listeners) *handover.add_listeners() = one;
  handover.set_state_lock_fd(state_.lock_fd());
  handover.set_upgrade_id(next.id);
  handover.set_replace_all(next.replace_all);
  for (const auto& [job, segments] : supervisor_->Kept()) {
    for (const auto& [rank, kept] : segments) {
      v1::SupervisorHandover::Kept& one = *handover.add_kept();
      one.set_job(job);
      *one.mutable_gradients() = kept.info;
      one.set_fd(kept.segment->get());
    }
  }
  return handover;
}

void Daemon::FinishUpgrade(const NextBuild& next) {
  absl::Status status =
      absl::AbortedError(absl::StrCat("signal ", signal_while_upgrading_));
  if (signal_while_upgrading_ == 0) {
    status = ExecuteInPlace(next.path, options_.arguments, MakeHandover(next));
  }
  spdlog::error("not upgraded: {}", status.ToString());
  upgrade_.AddProblem(std::string(status.message()));
  upgrade_.Finish();
  upgrading_ = false;
  status = RestartAdmin();
  if (!status.ok()) spdlog::error("{}", status.ToString());
  acceptor_->Release();
  if (signal_while_upgrading_ != 0) OnSignal(signal_while_upgrading_);
}

void Daemon::BeginEnd(const std::string& why, absl::Duration patience) {
  if (ending_) return;
  ending_ = true;
  spdlog::info("ending: {}", why);
  Notify("STOPPING=1");
  acceptor_->Stop();
  admin_server_->SetUnhealthy();
  rest_ = std::thread([this, patience] { RestAndStop(patience); });
}

// Runs on a thread of its own: it waits, and the loop must go on meanwhile.
void Daemon::RestAndStop(absl::Duration patience) {
  replacement_.reset();
  if (patience > absl::ZeroDuration()) {
    const absl::Status status = engines_.RestAll(absl::Now() + patience);
    if (status.ok()) {
      spdlog::info("no step is open");
    } else {
      spdlog::warn("ending with a step open: {}", status.ToString());
    }
  }
  admin_server_->Shutdown(absl::Now() + kCallsEnd);
  loop_->Post([this] { supervisor_->Stop([this] { loop_->Stop(); }); });
}

}  // namespace

absl::Status RunDaemon(DaemonOptions options) {
  const bool embedded = options.lifeline_fd >= 0;
  const v1::DaemonConfig config = options.config;
  supervisor::BlockSignals();
  RaiseFdLimit();
  if (options.handover.has_value()) ReapTheDead();
  {
    OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<Daemon> daemon,
                              Daemon::Start(std::move(options)));
    daemon->Run();
  }
  if (embedded) RemoveTraces(config);
  spdlog::info("ended");
  return absl::OkStatus();
}

}  // namespace optstate
