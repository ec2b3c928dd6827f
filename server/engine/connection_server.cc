#include "server/engine/connection_server.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"
#include "spdlog/spdlog.h"

namespace optstate {
namespace {

constexpr uint32_t kHandshakeTimeoutMs = 5000;
// A reply of a few bytes into the empty buffer of a new connection.
constexpr absl::Duration kHelloReplyTimeout = absl::Seconds(1);

absl::Duration HandshakeTimeout(const v1::EngineConfig& config) {
  const uint32_t configured = config.daemon().limits().handshake_timeout_ms();
  return absl::Milliseconds(configured == 0 ? kHandshakeTimeoutMs : configured);
}

uint64_t NewInstance() {
  absl::BitGen random;
  return absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1, UINT64_MAX);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ConnectionServer>> ConnectionServer::Start(
    const v1::EngineConfig& config, ControlChannel* control, Job* job,
    const absl::Status& failure) {
  std::unique_ptr<ConnectionServer> server(
      new ConnectionServer(config, control, job, failure));
  server->session_ended_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!server->session_ended_.ok()) return OsError(errno, "eventfd");
  if (job != nullptr) {
    OPTSTATE_RETURN_IF_ERROR(server->StartTransports());
  }
  OPTSTATE_RETURN_IF_ERROR(control->SendReady());
  return server;
}

ConnectionServer::ConnectionServer(const v1::EngineConfig& config,
                                   ControlChannel* control, Job* job,
                                   const absl::Status& failure)
    : config_(config),
      control_(control),
      job_(job),
      failure_(failure),
      handshake_timeout_(HandshakeTimeout(config)),
      engine_instance_(NewInstance()) {}

absl::Status ConnectionServer::StartTransports() {
  const auto on_session_end = [this] {
    ::eventfd_write(session_ended_.get(), 1);
  };
  OPTSTATE_ASSIGN_OR_RETURN(watcher_, FdWatcher::Start());
  shm_ = std::make_unique<ShmTransport>(
      ShmTransport::Options{.job = job_,
                            .table = &table_,
                            .watcher = watcher_.get(),
                            .settings = config_.daemon().engine(),
                            .handshake_timeout = handshake_timeout_,
                            .on_session_end = on_session_end});
  OPTSTATE_ASSIGN_OR_RETURN(
      grpc_, GrpcTransport::Start({.job = job_,
                                   .table = &table_,
                                   .watcher = watcher_.get(),
                                   .handshake_timeout = handshake_timeout_,
                                   .on_session_end = on_session_end}));
  return absl::OkStatus();
}

void ConnectionServer::Run() {
  while (ServeOnce()) FinishIfOver();
  if (job_ == nullptr) return;
  // Each session detaches, and a detach waits for the step being applied.
  shm_->Shutdown("optstated shuts down");
  grpc_->Shutdown();
}

bool ConnectionServer::ServeOnce() {
  pollfd fds[2] = {{control_->fd(), POLLIN, 0},
                   {session_ended_.get(), POLLIN, 0}};
  // A connection that never becomes a session ends without an event.
  const int timeout_ms =
      finished_
          ? -1
          : static_cast<int>(absl::ToInt64Milliseconds(handshake_timeout_));
  if (::poll(fds, 2, timeout_ms) < 0) return errno == EINTR;
  if (fds[1].revents != 0) {
    eventfd_t ended;
    ::eventfd_read(session_ended_.get(), &ended);
  }
  if (fds[0].revents == 0) return true;
  auto adopted = control_->Receive();
  if (adopted.ok()) {
    Adopt(*std::move(adopted));
    return true;
  }
  if (!absl::IsInvalidArgument(adopted.status())) return false;
  spdlog::error("control packet refused: {}", adopted.status().ToString());
  return true;
}

absl::Status ConnectionServer::CheckOpen() const {
  if (job_ == nullptr) return failure_;
  // Also before FinishIfOver() has seen it: whoever comes after the last detach
  // must not find the state that was to go with it.
  if (!finished_ && !job_->finished()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("job ", config_.job(), " has just ended; connect again"));
}

void ConnectionServer::Adopt(AdoptedConnection adopted) {
  absl::Status status = CheckOpen();
  const v1::Wire wire = adopted.message.hello().wire();
  if (status.ok() && wire != v1::WIRE_SHM && wire != v1::WIRE_GRPC) {
    status = absl::InvalidArgumentError(
        absl::StrCat("wire ", wire, " is not known here; 1 shm, 2 grpc"));
  }
  const absl::Status sent = SendHelloReply(adopted, status);
  if (!status.ok() || !sent.ok()) {
    spdlog::info("connection refused: job={} pid={} uid={} reason=\"{}\"",
                 config_.job(), adopted.message.peer_pid(),
                 adopted.message.peer_uid(),
                 (status.ok() ? sent : status).ToString());
    return;
  }
  adopted_any_ = true;
  last_adopted_ = absl::Now();
  Peer peer{.hello = std::move(*adopted.message.mutable_hello()),
            .uid = adopted.message.peer_uid(),
            .pid = adopted.message.peer_pid()};
  if (wire == v1::WIRE_SHM) {
    shm_->Serve(std::move(adopted.socket), std::move(peer));
  } else {
    grpc_->Serve(std::move(adopted.socket), std::move(peer));
  }
}

absl::Status ConnectionServer::SendHelloReply(
    const AdoptedConnection& adopted, const absl::Status& status) const {
  v1::HelloReply reply;
  *reply.mutable_status() = ToProto(status);
  reply.set_protocol_version(adopted.message.protocol_version());
  reply.set_server_version(std::string(kVersion));
  reply.set_engine_instance(engine_instance_);
  return shm::SendFrame(adopted.socket.get(), reply.SerializeAsString(), {},
                        absl::Now() + kHelloReplyTimeout);
}

size_t ConnectionServer::SessionCount() const {
  return shm_->session_count() + grpc_->session_count();
}

bool ConnectionServer::IsOver() const {
  if (!adopted_any_ || SessionCount() != 0) return false;
  if (job_->finished()) return true;
  // A gRPC connection is counted from when it starts its stream.
  if (absl::Now() - last_adopted_ < handshake_timeout_) return false;
  // Nobody registered it, or whoever did never attached.
  const v1::Job job = job_->Describe();
  return job.phase() == v1::JOB_PHASE_EMPTY || job.ephemeral();
}

void ConnectionServer::FinishIfOver() {
  if (job_ == nullptr || finished_ || !IsOver()) return;
  finished_ = true;
  const absl::Status sent = control_->SendFinished();
  spdlog::info("job is over: job={} reported=\"{}\"", config_.job(),
               sent.ToString());
}

}  // namespace optstate
