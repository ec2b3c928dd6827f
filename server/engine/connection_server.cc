#include "server/engine/connection_server.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"
#include "server/engine/versions.h"
#include "server/observe/logging.h"
#include "server/observe/peer_log.h"
#include "server/os/executable.h"
#include "spdlog/spdlog.h"

namespace optstate::engine {
namespace {

constexpr uint32_t kHandshakeTimeoutMs = 5000;
// The time that a rank is awaited is a day: a rank that sends nothing does not
// notice for a while that the engine was replaced.
constexpr uint32_t kReturnTimeoutMs = 86'400'000;
// Limit for writing a reply of a few bytes into the empty buffer of a new
// connection.
constexpr absl::Duration kHelloReplyTimeout = absl::Seconds(1);

absl::Duration HandshakeTimeout(const v1::Limits& limits) {
  const uint32_t configured = limits.handshake_timeout_ms();
  return absl::Milliseconds(configured == 0 ? kHandshakeTimeoutMs : configured);
}

absl::Duration ReturnTimeout(const v1::Limits& limits) {
  const uint32_t configured = limits.rank_return_timeout_ms();
  return absl::Milliseconds(configured == 0 ? kReturnTimeoutMs : configured);
}

uint64_t NewInstance() {
  absl::BitGen random;
  return absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1, UINT64_MAX);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ConnectionServer>> ConnectionServer::Start(
    Options options) {
  std::unique_ptr<ConnectionServer> server(
      new ConnectionServer(std::move(options)));
  server->session_ended_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!server->session_ended_.ok()) return OsError(errno, "eventfd");
  if (server->options_.job != nullptr) {
    OPTSTATE_RETURN_IF_ERROR(server->StartTransports());
    const v1::Limits& limits = server->options_.config.daemon().limits();
    server->awaited_.emplace(server->options_.job, ReturnTimeout(limits));
    server->awaited_->GiveUpEnded();
    // The peer that caused this engine's start connects within the time of a
    // handshake, or has gone.
    server->last_adopted_ = absl::Now();
  }
  return server;
}

ConnectionServer::ConnectionServer(Options options)
    : options_(std::move(options)),
      handshake_timeout_(HandshakeTimeout(options_.config.daemon().limits())),
      engine_instance_(NewInstance()),
      control_version_(kControlVersionMin),
      losses_(
          options_.link,
          [job = options_.job] { return job->Describe().committed_step(); }),
      table_(transport::SessionTable::Observers{
          .on_lost =
              [this](uint32_t rank, absl::string_view reason) {
                losses_.Report(rank, reason);
              },
          .wires = options_.wires}) {}

absl::Status ConnectionServer::StartTransports() {
  const auto on_session_end = [this] {
    ::eventfd_write(session_ended_.get(), 1);
  };
  OPTSTATE_ASSIGN_OR_RETURN(watcher_, transport::FdWatcher::Start());
  shm_ = std::make_unique<transport::ShmTransport>(
      transport::ShmTransport::Options{
          .job = options_.job,
          .table = &table_,
          .watcher = watcher_.get(),
          .settings = options_.config.daemon().engine(),
          .handshake_timeout = handshake_timeout_,
          .on_session_end = on_session_end});
  OPTSTATE_ASSIGN_OR_RETURN(grpc_, transport::GrpcTransport::Start(
                                       {.job = options_.job,
                                        .table = &table_,
                                        .watcher = watcher_.get(),
                                        .handshake_timeout = handshake_timeout_,
                                        .on_session_end = on_session_end}));
  return absl::OkStatus();
}

void ConnectionServer::TakeSupervise(SupervisorMessage message) {
  const v1::SupervisorRequest::Supervise& supervise =
      message.request.supervise();
  observe::SetLogLevel(supervise.log_level());
  // A supervisor of the build before takes an engine of its own version alone.
  control_version_ = std::clamp(supervise.control_version(), kControlVersionMin,
                                kControlVersion);
  losses_.TakeSupervisor(control_version_);
  const absl::Status served = options_.service->Serve(std::move(message.fd));
  if (!served.ok()) spdlog::error("{}", served.ToString());
  if (options_.job != nullptr) {
    TakeLimits(supervise.limits());
    if (supervise.has_quotas()) {
      options_.job->SetQuotas(supervise.quotas().quotas());
    }
    SetDraining(supervise.draining());
  }
  options_.reporter->ReportAll(MakeReady());
}

void ConnectionServer::SetDraining(bool draining) {
  losses_.SetDraining(draining);
  if (draining) {
    options_.job->BeginDrain();
  } else {
    options_.job->Resume();
  }
}

// Takes the supervisor's limits, which may differ from those that the engine
// was started with.
void ConnectionServer::TakeLimits(const v1::Limits& limits) {
  handshake_timeout_ = HandshakeTimeout(limits);
  options_.job->SetLimits(limits);
  shm_->SetHandshakeTimeout(handshake_timeout_);
  grpc_->SetHandshakeTimeout(handshake_timeout_);
}

v1::EngineEvent::Ready ConnectionServer::MakeReady() {
  v1::EngineEvent::Ready ready;
  ready.set_version(std::string(kVersion));
  ready.set_control_version(control_version_);
  ready.set_state_format_version(kStateFormatVersion);
  ready.set_engine_instance(engine_instance_);
  ready.set_restarts(options_.config.restarts());
  const absl::StatusOr<std::string> executable =
      os::ExecutableIdentity("/proc/self/exe");
  if (executable.ok()) ready.set_executable(*executable);
  for (const ino_t inode : connections_.Find()) ready.add_connections(inode);
  return ready;
}

void ConnectionServer::Run() {
  FinishIfOver();
  while (!options_.link->ended()) {
    ServeOnce();
    FinishIfOver();
  }
}

// Returns the time of the next check: a connection that never becomes a session
// ends without an event.
absl::Time ConnectionServer::NextLook() const {
  absl::Time look = absl::InfiniteFuture();
  if (!finished_) look = absl::Now() + handshake_timeout_;
  return awaited_.has_value() ? std::min(look, awaited_->deadline()) : look;
}

void ConnectionServer::ServeOnce() {
  std::vector<pollfd> fds = {{options_.link->fd(), POLLIN, 0},
                             {session_ended_.get(), POLLIN, 0}};
  if (awaited_.has_value()) awaited_->AppendTo(&fds);
  const absl::Time look = NextLook();
  // The timeout is rounded up.
  const int timeout_ms =
      look == absl::InfiniteFuture()
          ? -1
          : static_cast<int>(std::max<int64_t>(
                absl::ToInt64Milliseconds(look - absl::Now()) + 1, 0));
  if (::poll(fds.data(), fds.size(), timeout_ms) < 0) return;  // EINTR
  observe::LogLeftOut();
  if (awaited_.has_value()) awaited_->GiveUpEnded();
  if (fds[1].revents != 0) {
    eventfd_t ended;
    ::eventfd_read(session_ended_.get(), &ended);
    if (awaited_.has_value()) awaited_->Refresh();
  }
  if (fds[0].revents == 0) return;
  if (options_.link->TakeWritable()) options_.reporter->Flush();
  TakeRequests();
}

void ConnectionServer::TakeRequests() {
  while (true) {
    std::optional<SupervisorMessage> message = options_.link->Receive();
    if (!message.has_value()) return;
    if (message->request.has_supervise()) {
      TakeSupervise(*std::move(message));
    } else if (message->request.has_adopt_connection()) {
      Adopt(message->request.adopt_connection(), std::move(message->fd));
    } else if (message->request.has_drain() && options_.job != nullptr) {
      const bool draining = message->request.drain().draining();
      spdlog::info("{}: job={}", draining ? "drain" : "drain ended",
                   options_.config.job());
      SetDraining(draining);
    }
    // The other requests are for a job that is not open yet.
  }
}

absl::Status ConnectionServer::CheckOpen() const {
  if (options_.job == nullptr) return options_.failure;
  // Checks the job as well, which FinishIfOver() may not have seen yet: a
  // connection after the last detach must not find the state that ends with it.
  if (!finished_ && !options_.job->finished()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("job ", options_.config.job(),
                                             " has just ended; connect again"));
}

void ConnectionServer::Adopt(const v1::AdoptConnection& adopt,
                             UniqueFd socket) {
  absl::Status status = CheckOpen();
  const v1::Wire wire = adopt.hello().wire();
  if (status.ok() && wire != v1::WIRE_SHM && wire != v1::WIRE_GRPC) {
    status = absl::InvalidArgumentError(
        absl::StrCat("wire ", wire, " is not known here; 1 shm, 2 grpc"));
  }
  if (!status.ok() && options_.wires != nullptr) {
    options_.wires->Of(wire == v1::WIRE_SHM ? "shm" : "grpc")
        ->AddRefused(status.code());
  }
  const absl::Status sent = SendHelloReply(socket.get(), adopt, status);
  if (!status.ok() || !sent.ok()) {
    observe::LogOfPeer(spdlog::level::info, "connection refused",
                       absl::StrCat("uid ", adopt.peer_uid()),
                       "connection refused: job={} pid={} uid={} reason=\"{}\"",
                       options_.config.job(), adopt.peer_pid(),
                       adopt.peer_uid(),
                       (status.ok() ? sent : status).ToString());
    return;
  }
  last_adopted_ = absl::Now();
  connections_.Note(socket.get());
  transport::Peer peer{
      .hello = adopt.hello(), .uid = adopt.peer_uid(), .pid = adopt.peer_pid()};
  if (wire == v1::WIRE_SHM) {
    shm_->Serve(std::move(socket), std::move(peer));
  } else {
    grpc_->Serve(std::move(socket), std::move(peer));
  }
}

absl::Status ConnectionServer::SendHelloReply(
    int socket, const v1::AdoptConnection& adopt,
    const absl::Status& status) const {
  v1::HelloReply reply;
  *reply.mutable_status() = ToProto(status);
  reply.set_protocol_version(adopt.protocol_version());
  reply.set_server_version(std::string(kVersion));
  reply.set_engine_instance(engine_instance_);
  reply.set_knows_two_phases(true);
  reply.set_knows_awaited_norms(true);
  return shm::SendFrame(socket, reply.SerializeAsString(), {},
                        absl::Now() + kHelloReplyTimeout);
}

size_t ConnectionServer::SessionCount() const {
  return shm_->session_count() + grpc_->session_count();
}

bool ConnectionServer::IsOver() const {
  if (SessionCount() != 0) return false;
  if (options_.job->finished()) return true;
  if (!options_.job->Awaited().empty()) return false;
  // A gRPC connection is counted only from the start of its stream.
  if (absl::Now() - last_adopted_ < handshake_timeout_) return false;
  // No rank registered the job, or none that did has attached.
  const v1::Job job = options_.job->Describe();
  return job.phase() == v1::JOB_PHASE_EMPTY || job.ephemeral();
}

void ConnectionServer::FinishIfOver() {
  if (options_.job == nullptr || finished_ || !IsOver()) return;
  finished_ = true;
  options_.reporter->SetFinished();
  spdlog::info("job is over: job={}", options_.config.job());
}

}  // namespace optstate::engine
