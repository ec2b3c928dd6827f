#include "server/daemon.h"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/cpu/targets.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "proto/types/version.h"
#include "server/admin/admin_server.h"
#include "server/admin/admin_service.h"
#include "server/admin/engine_channels.h"
#include "server/admin/server_info.h"
#include "server/observe/logging.h"
#include "server/observe/sd_notify.h"
#include "server/scheduler/available_cores.h"
#include "server/supervisor/acceptor.h"
#include "server/supervisor/event_loop.h"
#include "server/supervisor/handshake.h"
#include "server/supervisor/listener.h"
#include "server/supervisor/private_directory.h"
#include "server/supervisor/signals.h"
#include "server/supervisor/state_directory.h"
#include "server/supervisor/supervisor.h"

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

// For admin calls that run when the daemon ends.
constexpr absl::Duration kCallsEnd = absl::Seconds(1);

// Sessions and gRPC connections each take one.
void RaiseFdLimit() {
  rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

void Notify(absl::string_view state) {
  const absl::Status status = observe::NotifyServiceManager(state);
  if (!status.ok()) spdlog::warn("{}", status.ToString());
}

absl::StatusOr<std::vector<std::unique_ptr<Listener>>> OpenListeners(
    const v1::DaemonConfig& config) {
  std::vector<std::string> addresses = {"unix:" + config.socket()};
  addresses.insert(addresses.end(), config.listen().begin(),
                   config.listen().end());
  std::vector<std::unique_ptr<Listener>> listeners;
  for (const std::string& text : addresses) {
    OPTSTATE_ASSIGN_OR_RETURN(const supervisor::ListenAddress address,
                              supervisor::ParseListenAddress(text));
    OPTSTATE_ASSIGN_OR_RETURN(
        auto listener,
        Listener::Open(address, static_cast<mode_t>(config.socket_mode())));
    listeners.push_back(std::move(listener));
  }
  return listeners;
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
  info.workers = config.engine().workers() != 0
                     ? config.engine().workers()
                     : static_cast<uint32_t>(AvailableCores());
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
class Daemon {
 public:
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(DaemonOptions options);
  ~Daemon();

  void Run() { loop_->Run(); }

 private:
  Daemon(DaemonOptions options, std::unique_ptr<EventLoop> loop,
         StateDirectory state);

  absl::Status Build();
  absl::Status BuildAdmin(
      const std::vector<std::unique_ptr<Listener>>& listeners);
  absl::Status WatchLifeline();
  void OnGrpc(UniqueFd fd, const PeerCredentials& peer);
  void OnSignal(int signal);
  void Reload();
  void BeginEnd(const std::string& why, absl::Duration drain_timeout);
  void DrainAndStop(absl::Duration drain_timeout);

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
  bool ending_ = false;
  std::thread drain_;
};

Daemon::Daemon(DaemonOptions options, std::unique_ptr<EventLoop> loop,
               StateDirectory state)
    : options_(std::move(options)),
      loop_(std::move(loop)),
      state_(std::move(state)),
      lifeline_(options_.lifeline_fd) {}

Daemon::~Daemon() {
  if (drain_.joinable()) drain_.join();
  if (lifeline_.ok()) loop_->Unwatch(lifeline_.get());
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(DaemonOptions options) {
  OPTSTATE_ASSIGN_OR_RETURN(auto loop, EventLoop::Create());
  OPTSTATE_ASSIGN_OR_RETURN(StateDirectory state,
                            StateDirectory::Open(options.config));
  std::unique_ptr<Daemon> daemon(
      new Daemon(std::move(options), std::move(loop), std::move(state)));
  OPTSTATE_RETURN_IF_ERROR(daemon->Build());
  return daemon;
}

absl::Status Daemon::Build() {
  const v1::DaemonConfig& config = options_.config;
  OPTSTATE_ASSIGN_OR_RETURN(auto listeners, OpenListeners(config));
  OPTSTATE_ASSIGN_OR_RETURN(
      signals_, SignalWatch::Start(loop_.get(),
                                   [this](int signal) { OnSignal(signal); }));
  OPTSTATE_RETURN_IF_ERROR(WatchLifeline());

  supervisor_ = std::make_unique<Supervisor>(
      loop_.get(),
      Supervisor::Options{config, options_.executable, lifeline_.ok()},
      state_.TakeRegistry(),
      Supervisor::Callbacks{
          [this](const std::string& job, UniqueFd grpc) {
            engines_.Set(job, std::move(grpc));
          },
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
          }});
  acceptor_ = std::make_unique<Acceptor>(
      loop_.get(), std::move(listeners),
      [this](UniqueFd fd, const PeerCredentials& peer) {
        handshakes_->Start(std::move(fd), peer);
      });
  // Engines first: they take longest.
  supervisor_->Start();
  OPTSTATE_RETURN_IF_ERROR(acceptor_->Start());
  Notify("READY=1");
  return absl::OkStatus();
}

absl::Status Daemon::BuildAdmin(
    const std::vector<std::unique_ptr<Listener>>& listeners) {
  admin::ServerInfo info =
      DescribeServer(options_.config, state_.pages(), listeners);
  LogStart(info);
  admin_service_ = std::make_unique<admin::AdminService>(
      supervisor_.get(), &engines_, std::move(info));
  OPTSTATE_ASSIGN_OR_RETURN(admin_server_,
                            admin::AdminServer::Start(admin_service_.get()));
  return absl::OkStatus();
}

absl::Status Daemon::WatchLifeline() {
  if (!lifeline_.ok()) return absl::OkStatus();
  return loop_->Watch(lifeline_.get(), EPOLLIN, [this](uint32_t) {
    char ignored[64];
    if (::read(lifeline_.get(), ignored, sizeof(ignored)) > 0) return;
    loop_->Unwatch(lifeline_.get());
    // Nobody is left who could finish a step.
    BeginEnd("the trainer has ended", absl::ZeroDuration());
  });
}

void Daemon::OnGrpc(UniqueFd fd, const PeerCredentials& peer) {
  const absl::Status status = admin_server_->Serve(std::move(fd), peer.uid);
  if (!status.ok()) {
    spdlog::warn("gRPC connection of uid {} pid {} dropped: {}", peer.uid,
                 peer.pid, status.ToString());
  }
}

void Daemon::OnSignal(int signal) {
  if (signal == SIGHUP) return Reload();
  if (ending_) {
    spdlog::warn("signal {} again: ending at once", signal);
    supervisor_->TellEnginesToStop();
    ::_exit(128 + signal);
  }
  BeginEnd(absl::StrCat("signal ", signal),
           absl::Seconds(options_.config.drain_timeout_s()));
}

void Daemon::Reload() {
  if (options_.reload == nullptr) {
    spdlog::info("SIGHUP ignored: there is no configuration file");
    return;
  }
  const absl::StatusOr<v1::DaemonConfig> config = options_.reload();
  if (!config.ok()) {
    spdlog::error("SIGHUP: the configuration stays as it is: {}",
                  config.status().ToString());
    return;
  }
  observe::SetLogLevel(config->log_level());
  supervisor_->SetLimits(config->limits());
  handshakes_->set_timeout(
      absl::Milliseconds(config->limits().handshake_timeout_ms()));
  spdlog::info(
      "SIGHUP: log_level {}, jobs_max {}, sessions_max {} and "
      "handshake_timeout_ms {} are taken over, everything else at the next "
      "start",
      config->log_level(), config->limits().jobs_max(),
      config->limits().sessions_max(), config->limits().handshake_timeout_ms());
}

void Daemon::BeginEnd(const std::string& why, absl::Duration drain_timeout) {
  if (ending_) return;
  ending_ = true;
  spdlog::info("ending: {}", why);
  Notify("STOPPING=1");
  acceptor_->Stop();
  admin_server_->SetUnhealthy();
  supervisor_->SetDraining(true);
  drain_ = std::thread([this, drain_timeout] { DrainAndStop(drain_timeout); });
}

// On a thread of its own: it waits, and the loop must go on meanwhile.
void Daemon::DrainAndStop(absl::Duration drain_timeout) {
  if (drain_timeout > absl::ZeroDuration()) {
    const absl::Status status =
        engines_.DrainAll(/*resume=*/false, absl::Now() + drain_timeout);
    if (status.ok()) {
      spdlog::info("drained: no step is open");
    } else {
      spdlog::warn("ending with a step open: {}", status.ToString());
    }
  }
  admin_server_->Shutdown(absl::Now() + kCallsEnd);
  loop_->Post([this] { supervisor_->Stop([this] { loop_->Stop(); }); });
}

// A private daemon leaves nothing behind.
void RemoveTraces(const v1::DaemonConfig& config) {
  const absl::Status status = supervisor::RemoveTree(config.state_dir());
  if (!status.ok()) spdlog::warn("{}", status.ToString());
  (void)::unlink((config.socket() + ".lock").c_str());
}

}  // namespace

absl::Status RunDaemon(DaemonOptions options) {
  const bool embedded = options.lifeline_fd >= 0;
  const v1::DaemonConfig config = options.config;
  supervisor::BlockSignals();
  RaiseFdLimit();
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
