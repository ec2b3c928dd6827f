#include "server/daemon.h"

#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "proto/types/version.h"
#include "server/accept/acceptor.h"
#include "server/accept/configured_listeners.h"
#include "server/accept/entrance.h"
#include "server/access/live_access.h"
#include "server/access/unix_roles.h"
#include "server/admin/admin_server.h"
#include "server/admin/admin_service.h"
#include "server/admin/engine_channels.h"
#include "server/admin/server_info.h"
#include "server/metrics/admin_source.h"
#include "server/metrics/metrics_server.h"
#include "server/observe/event_log.h"
#include "server/observe/node_event.h"
#include "server/observe/peer_log.h"
#include "server/observe/sd_notify.h"
#include "server/os/event_loop.h"
#include "server/os/fd_limit.h"
#include "server/os/lifeline.h"
#include "server/os/private_directory.h"
#include "server/os/signals.h"
#include "server/scheduler/workers/memory_bandwidth.h"
#include "server/scheduler/workers/memory_bandwidth_record.h"
#include "server/start_report.h"
#include "server/supervisor/job_events.h"
#include "server/supervisor/kept_segments.h"
#include "server/supervisor/state_directory.h"
#include "server/supervisor/supervisor.h"
#include "server/upgrade/engine_replacement.h"
#include "server/upgrade/in_place_upgrade.h"
#include "server/upgrade/next_config.h"
#include "server/upgrade/upgrade_record.h"

namespace optstate::server {
namespace {

using accept::PeerCredentials;
using supervisor::Supervisor;

// Grace for admin calls that run when the daemon ends.
constexpr absl::Duration kCallsEnd = absl::Seconds(1);
constexpr absl::Duration kReportSuppressedEvery = absl::Seconds(10);

// Reaps engines that died while this build was being executed: they are
// children of the process, and no EngineProcess knows them. Called before any
// EngineProcess exists.
void ReapTheDead() {
  while (::waitpid(-1, nullptr, WNOHANG) > 0) {
  }
}

// Time for the next report of progress, when engines bring their last steps to
// disk: the service manager must not kill the daemon meanwhile.
constexpr absl::string_view kExtendTimeout = "EXTEND_TIMEOUT_USEC=60000000";

void Notify(absl::string_view state) {
  const absl::Status status = observe::NotifyServiceManager(state);
  if (!status.ok()) spdlog::warn("{}", status.ToString());
}

bool SpeaksTls(const v1::DaemonConfig& config) {
  return !config.tls().certificate_file().empty();
}

// Removes a private daemon's files: such a daemon leaves nothing behind.
void RemoveTraces(const v1::DaemonConfig& config) {
  const absl::Status status = os::RemoveTree(config.state_dir());
  if (!status.ok()) spdlog::warn("{}", status.ToString());
  (void)::unlink((config.socket() + ".lock").c_str());
}

// The running daemon. Members are in the order in which they are built; each
// uses only those above it, but for upgrade_, whose callbacks use those below
// while the loop runs or its thread does.
class Daemon {
 public:
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(DaemonOptions options);
  ~Daemon();

  void Run() { loop_->Run(); }

 private:
  Daemon(DaemonOptions options, std::unique_ptr<os::EventLoop> loop,
         supervisor::StateDirectory state);

  absl::Status Build();
  // Continues the events of the build before this one, and adds its start.
  void NoteStart() const;
  // Makes the object that changes this build for another.
  std::unique_ptr<upgrade::InPlaceUpgrade> MakeUpgrade();
  std::unique_ptr<Supervisor> MakeSupervisor();
  absl::Status OpenEntrance();
  absl::Status BuildAdmin(const accept::Listeners& listeners);
  absl::Status RestartAdmin();
  absl::Status StartMetrics();
  void OnGrpc(UniqueFd fd, const PeerCredentials& peer);
  void OnSignal(int signal);
  // Logs the counts of suppressed lines from time to time.
  void ReportSuppressedLines();
  void PingWatchdog();

  absl::StatusOr<v1::DaemonConfig> ConfigForUpgrade() const;
  absl::StatusOr<accept::ListenersByAddress> OpenMissing(
      const v1::DaemonConfig& next) const;
  void GoOnAfterUpgrade();

  void EndCalls();
  void BeginEnd(const std::string& why, absl::Duration patience);
  void PauseAndStop(absl::Duration patience);

  const v1::DaemonConfig& config() const { return options_.config; }
  // Returns whether a trainer holds the daemon's lifeline.
  bool is_private() const { return options_.lifeline_fd >= 0; }

  const DaemonOptions options_;
  const std::unique_ptr<os::EventLoop> loop_;
  supervisor::StateDirectory state_;
  admin::EngineChannels engines_;
  upgrade::UpgradeRecord upgrade_record_;
  std::unique_ptr<upgrade::InPlaceUpgrade> upgrade_;
  std::unique_ptr<access::LiveAccess> access_;  // null: no TLS
  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<admin::AdminService> admin_service_;
  std::unique_ptr<admin::AdminServer> admin_server_;
  std::optional<metrics::AdminSource> node_source_;
  std::unique_ptr<metrics::MetricsServer> metrics_;  // null: off
  std::unique_ptr<accept::Entrance> entrance_;
  std::unique_ptr<accept::Acceptor> acceptor_;
  std::unique_ptr<os::SignalWatch> signals_;
  std::unique_ptr<os::Lifeline> lifeline_;
  std::optional<upgrade::EngineReplacement> replacement_;
  bool ending_ = false;
  std::optional<scheduler::MemoryBandwidthMeter> meter_;
  std::thread pausing_;
};

Daemon::Daemon(DaemonOptions options, std::unique_ptr<os::EventLoop> loop,
               supervisor::StateDirectory state)
    : options_(std::move(options)),
      loop_(std::move(loop)),
      state_(std::move(state)) {}

Daemon::~Daemon() {
  if (upgrade_ != nullptr) upgrade_->Join();
  if (pausing_.joinable()) pausing_.join();
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(DaemonOptions options) {
  OPTSTATE_ASSIGN_OR_RETURN(auto loop, os::EventLoop::Create());
  UniqueFd lock(options.handover.has_value() ? options.handover->state_lock_fd()
                                             : -1);
  OPTSTATE_ASSIGN_OR_RETURN(
      supervisor::StateDirectory state,
      supervisor::StateDirectory::Open(options.config, std::move(lock)));
  std::unique_ptr<Daemon> daemon(
      new Daemon(std::move(options), std::move(loop), std::move(state)));
  OPTSTATE_RETURN_IF_ERROR(daemon->Build());
  return daemon;
}

absl::Status Daemon::Build() {
  NoteStart();
  // From here on the fd is owned.
  UniqueFd lifeline(options_.lifeline_fd);
  OPTSTATE_ASSIGN_OR_RETURN(access::UnixRoles unix_roles,
                            access::UnixRoles::Find(config().access()));
  if (SpeaksTls(config())) {
    OPTSTATE_ASSIGN_OR_RETURN(access_, access::LiveAccess::Load(config()));
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      accept::Listeners listeners,
      accept::OpenListeners(
          config(),
          options_.handover.has_value() ? &*options_.handover : nullptr,
          options_.activated));
  OPTSTATE_ASSIGN_OR_RETURN(
      signals_, os::SignalWatch::Start(
                    loop_.get(), [this](int signal) { OnSignal(signal); }));
  if (is_private()) {
    OPTSTATE_ASSIGN_OR_RETURN(
        lifeline_,
        os::Lifeline::Watch(loop_.get(), std::move(lifeline), [this] {
          // No rank is left that could finish a step.
          BeginEnd("the trainer has ended", absl::ZeroDuration());
        }));
  }
  upgrade_ = MakeUpgrade();
  supervisor_ = MakeSupervisor();
  OPTSTATE_RETURN_IF_ERROR(BuildAdmin(listeners));
  const absl::Status started = StartMetrics();
  // A build that has taken over goes on all the same: jobs depend on it.
  if (!options_.handover.has_value()) OPTSTATE_RETURN_IF_ERROR(started);
  OPTSTATE_RETURN_IF_ERROR(OpenEntrance());
  acceptor_ = std::make_unique<accept::Acceptor>(
      loop_.get(), std::move(listeners),
      [this](UniqueFd fd, const PeerCredentials& peer) {
        entrance_->OnConnection(std::move(fd), peer);
      },
      std::move(unix_roles));
  // A trainer's private daemon has a new state directory each time.
  if (!is_private()) {
    WarnOfFewFds(config());
    meter_.emplace(config().state_dir(), static_cast<int>(WorkersOf(config())),
                   scheduler::MeasureMemoryBandwidth);
  }
  // Engines are started first: they take longest.
  supervisor_->Start();
  OPTSTATE_RETURN_IF_ERROR(acceptor_->Start());
  if (options_.handover.has_value()) {
    upgrade_record_.Begin(options_.handover->upgrade_id());
    replacement_.emplace(upgrade::EngineReplacement::Options{
        supervisor_.get(), &engines_, &upgrade_record_,
        options_.handover->replace_all(),
        absl::Seconds(config().drain_timeout_s())});
  }
  ReportSuppressedLines();
  if (metrics_ != nullptr) metrics_->Open();
  Notify("READY=1");
  PingWatchdog();
  return absl::OkStatus();
}

void Daemon::NoteStart() const {
  std::string text =
      absl::StrCat("optstated ", kVersion, " starts, pid ", ::getpid());
  if (options_.handover.has_value()) {
    const auto& events = options_.handover->events();
    observe::Events().Restore({events.begin(), events.end()});
    text += ", in the place of another build";
  }
  observe::NoteNodeEvent(v1::EVENT_SEVERITY_INFO, "daemon_started", text);
}

std::unique_ptr<upgrade::InPlaceUpgrade> Daemon::MakeUpgrade() {
  return std::make_unique<upgrade::InPlaceUpgrade>(
      upgrade::InPlaceUpgrade::Options{.loop = loop_.get(),
                                       .record = &upgrade_record_,
                                       .arguments = options_.arguments,
                                       .is_private = is_private()},
      upgrade::InPlaceUpgrade::Callbacks{
          .load_config = [this] { return ConfigForUpgrade(); },
          .open_missing =
              [this](const v1::DaemonConfig& next) {
                return OpenMissing(next);
              },
          .pause = [this] { acceptor_->Hold(); },
          .end_calls = [this] { EndCalls(); },
          .hand_over =
              [this](const accept::ListenersByAddress& missing,
                     v1::SupervisorHandover* handover) {
                accept::HandOverListeners(config(), acceptor_->listeners(),
                                          missing, handover);
                handover->set_state_lock_fd(state_.lock_fd());
                supervisor::HandOverKept(supervisor_->Kept(), handover);
                for (auto& sleep : supervisor_->SleepsUnderWay()) {
                  *handover->add_sleeps() = std::move(sleep);
                }
                for (v1::Event& event : observe::Events().After(0)) {
                  *handover->add_events() = std::move(event);
                }
              },
          .resume = [this] { GoOnAfterUpgrade(); },
          .on_signal = [this](int signal) { OnSignal(signal); }});
}

std::unique_ptr<Supervisor> Daemon::MakeSupervisor() {
  supervisor::KeptByJob kept;
  std::vector<supervisor::SleepingJobs::UnderWay> sleeps;
  if (options_.handover.has_value()) {
    kept = supervisor::InheritKept(*options_.handover);
    sleeps.assign(options_.handover->sleeps().begin(),
                  options_.handover->sleeps().end());
  }
  return std::make_unique<Supervisor>(
      loop_.get(),
      Supervisor::Options{
          config(), options_.executable, is_private(), std::move(kept),
          [this] { return state_.CheckInPlace(); }, std::move(sleeps)},
      state_.TakeRegistry(),
      Supervisor::Callbacks{
          [this](const std::string& job, UniqueFd grpc) {
            engines_.Set(job, std::move(grpc));
          },
          [this](const std::string& job) { engines_.Lose(job); },
          [this](const std::string& job) { engines_.Erase(job); }});
}

absl::Status Daemon::OpenEntrance() {
  OPTSTATE_ASSIGN_OR_RETURN(
      entrance_, accept::Entrance::Open(
                     loop_.get(), config(), access_.get(),
                     accept::Entrance::Callbacks{
                         [this](UniqueFd fd, const PeerCredentials& peer,
                                v1::Hello hello) {
                           supervisor_->OnHello(std::move(fd), peer,
                                                std::move(hello));
                         },
                         [this](UniqueFd fd, const PeerCredentials& peer) {
                           OnGrpc(std::move(fd), peer);
                         },
                         [this](UniqueFd fd, const absl::Status& why) {
                           admin_server_->Refuse(std::move(fd), why);
                         }}));
  return absl::OkStatus();
}

absl::Status Daemon::BuildAdmin(const accept::Listeners& listeners) {
  admin::ServerInfo info = DescribeServer(config(), state_.pages(), listeners);
  LogStart(info);
  admin_service_ = std::make_unique<admin::AdminService>(
      supervisor_.get(), &engines_, upgrade_.get(), std::move(info));
  return RestartAdmin();
}

absl::Status Daemon::RestartAdmin() {
  admin::AdminServer::Limits limits;
  limits.connections_of_user = config().limits().user_grpc_connections_max();
  admin::TokenCheck tokens;
  if (access_ != nullptr) {
    tokens = [this](absl::string_view token) {
      return access_->Current()->FindByToken(token);
    };
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      admin_server_, admin::AdminServer::Start(admin_service_.get(), limits,
                                               std::move(tokens)));
  return absl::OkStatus();
}

absl::Status Daemon::StartMetrics() {
  const std::string& address = config().metrics().address();
  if (address.empty()) return absl::OkStatus();
  node_source_.emplace(admin_service_.get());
  auto started = metrics::MetricsServer::Start(address, &*node_source_);
  if (!started.ok()) {
    spdlog::error("no metrics: {}", started.status().ToString());
    return started.status();
  }
  metrics_ = *std::move(started);
  spdlog::info("metrics: listening on {}", metrics_->name());
  return absl::OkStatus();
}

void Daemon::OnGrpc(UniqueFd fd, const PeerCredentials& peer) {
  const absl::Status status =
      admin_server_->Serve(std::move(fd), peer.caller, peer.quota_name());
  if (!status.ok()) {
    observe::LogOfPeer(spdlog::level::warn, "gRPC connection refused",
                       peer.quota_name(),
                       "gRPC connection of {} pid {} refused: {}",
                       peer.quota_name(), peer.pid, status.ToString());
  }
}

void Daemon::ReportSuppressedLines() {
  observe::LogLeftOut();
  supervisor::JobEvents::TellLossesLeftOut();
  loop_->RunAfter(kReportSuppressedEvery, [this] { ReportSuppressedLines(); });
}

// Tells the service manager, from the loop, that the loop goes on.
void Daemon::PingWatchdog() {
  const absl::Duration limit = observe::WatchdogLimit();
  if (limit == absl::InfiniteDuration()) return;
  Notify("WATCHDOG=1");
  loop_->RunAfter(limit / 2, [this] { PingWatchdog(); });
}

void Daemon::OnSignal(int signal) {
  if (signal == SIGHUP) return upgrade_->OnHangup();
  if (upgrade_->Interrupt(signal)) return;
  if (ending_) {
    spdlog::warn("signal {} again: ending at once", signal);
    supervisor_->TellEnginesToStop();
    if (is_private()) RemoveTraces(config());
    ::_exit(128 + signal);
  }
  BeginEnd(absl::StrCat("signal ", signal),
           absl::Seconds(config().drain_timeout_s()));
}

absl::StatusOr<v1::DaemonConfig> Daemon::ConfigForUpgrade() const {
  OPTSTATE_RETURN_IF_ERROR(state_.CheckInPlace());
  absl::StatusOr<v1::DaemonConfig> next = options_.reload();
  if (!next.ok()) return upgrade::AsRefusal(next.status());
  OPTSTATE_RETURN_IF_ERROR(upgrade::CheckSamePlace(config(), *next));
  return next;
}

absl::StatusOr<accept::ListenersByAddress> Daemon::OpenMissing(
    const v1::DaemonConfig& next) const {
  const std::string& address = next.metrics().address();
  if (!address.empty() && address != config().metrics().address()) {
    // The next build opens it anew, because nothing is lost meanwhile.
    const absl::Status possible =
        metrics::MetricsServer::Start(address, nullptr).status();
    if (!possible.ok()) return upgrade::AsRefusal(possible);
  }
  return accept::OpenMissing(config(), acceptor_->listeners(), next);
}

void Daemon::GoOnAfterUpgrade() {
  const absl::Status status = RestartAdmin();
  if (!status.ok()) spdlog::error("{}", status.ToString());
  if (StartMetrics().ok() && metrics_ != nullptr) metrics_->Open();
  acceptor_->Release();
}

void Daemon::EndCalls() {
  metrics_.reset();  // it asks the loop, which runs until all is done
  admin_server_->Shutdown(absl::Now() + kCallsEnd);
  entrance_->Flush(absl::Now() + kCallsEnd);
}

void Daemon::BeginEnd(const std::string& why, absl::Duration patience) {
  if (ending_) return;
  ending_ = true;
  upgrade_->Close();
  spdlog::info("ending: {}", why);
  observe::NoteNodeEvent(v1::EVENT_SEVERITY_INFO, "daemon_ending", why);
  Notify("STOPPING=1");
  acceptor_->Stop();
  admin_server_->SetUnhealthy();
  pausing_ = std::thread([this, patience] { PauseAndStop(patience); });
}

// Runs on a thread of its own: it waits, and the loop must go on meanwhile.
void Daemon::PauseAndStop(absl::Duration patience) {
  replacement_.reset();
  if (patience > absl::ZeroDuration()) {
    const absl::Status status = engines_.PauseAll(absl::Now() + patience);
    if (status.ok()) {
      spdlog::info("no step is open");
    } else {
      spdlog::warn("ending with a step open: {}", status.ToString());
    }
  }
  EndCalls();
  loop_->Post([this] {
    supervisor_->Stop([this] { loop_->Stop(); },
                      [] { Notify(kExtendTimeout); });
  });
}

}  // namespace

absl::Status CheckNamedThings(const v1::DaemonConfig& config) {
  OPTSTATE_RETURN_IF_ERROR(access::UnixRoles::Find(config.access()).status());
  if (!SpeaksTls(config)) return absl::OkStatus();
  return access::LiveAccess::Load(config).status();
}

absl::Status RunDaemon(DaemonOptions options) {
  const bool embedded = options.lifeline_fd >= 0;
  const v1::DaemonConfig config = options.config;
  os::BlockSignals();
  os::RaiseFdLimit();
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

}  // namespace optstate::server
