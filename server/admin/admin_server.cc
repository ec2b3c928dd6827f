#include "server/admin/admin_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_posix.h>
#include <unistd.h>

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/admin/admin_calls.h"
#include "server/admin/call_counter.h"
#include "server/admin/call_timer.h"
#include "server/admin/grpc_gate.h"
#include "server/observe/counters.h"

namespace optstate::admin {
namespace {

// Threads for one caller's concurrent calls; a drain or a deletion occupies one
// until it ends.
constexpr int kOperatorThreadsMax = 16;
constexpr int kThreadsMax = 6;
// Threads that wait for a next call, of those that had one: more than that end.
// Making a thread for each call costs more than most calls do.
constexpr int kPollersMax = 4;
// The part of these that may watch events at once: each does for minutes.
constexpr int kEventStreamsDivisor = 2;
// Number of callers with a server of their own, besides root and the daemon's
// user; further callers share one.
constexpr size_t kServersMax = 16;
// A request is a name and a few numbers.
constexpr int kRequestBytesMax = 64 << 10;
// Concurrent streams of one connection. A client's further calls wait in the
// client.
constexpr int kStreamsMax = 16;
// Time after which a connection without a call is closed.
constexpr int kIdleMs = 60'000;
// Time to pass on gRPC's last bytes when the server ends.
constexpr absl::Duration kFlushTimeout = absl::Seconds(1);

// Returns whether the caller has a server of its own for good: there are few
// such callers, while certificates may make any number of operators.
bool KeepsServer(const Caller& caller) {
  return caller.is_operator() && caller.is_local() &&
         (caller.uid == 0 || caller.uid == ::geteuid());
}

// The gRPC server of one caller, with threads of its own: a caller that uses
// them up does not delay others.
class CallersServer {
 public:
  CallersServer(AdminService* service, const ConnectionUids* uids,
                TokenCheck tokens, int threads_max)
      : threads_max_(threads_max),
        calls_(service, uids, std::move(tokens),
               static_cast<size_t>(threads_max / kEventStreamsDivisor)) {}
  ~CallersServer() { Shutdown(absl::Now()); }

  absl::Status Start(CallTimer* timer) {
    grpc::ResourceQuota quota("admin");
    quota.SetMaxThreads(threads_max_);
    grpc::ServerBuilder builder;
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(kRequestBytesMax);
    builder.SetMaxSendMessageSize(-1);
    builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, kPollersMax);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsMax);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
    auto interceptors = timer->Interceptors();
    interceptors.push_back(MakeCallCounter());
    builder.experimental().SetInterceptorCreators(std::move(interceptors));
    builder.RegisterService(static_cast<v1::Admin::Service*>(&calls_));
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::InternalError("a gRPC server of Admin did not start");
    }
    // By default only "" is known. SetUnhealthy applies to both.
    server_->GetHealthCheckService()->SetServingStatus(
        v1::Admin::service_full_name(), true);
    return absl::OkStatus();
  }

  void Serve(int fd) { grpc::AddInsecureChannelFromFd(server_.get(), fd); }

  void SetUnhealthy() {
    server_->GetHealthCheckService()->SetServingStatus(false);
  }

  // Ends the calls that wait for events: the others are to end by themselves.
  void EndEventStreams() { calls_.EndEventStreams(); }

  void Shutdown(absl::Time deadline) {
    if (server_ == nullptr) return;
    EndEventStreams();
    server_->Shutdown(absl::ToChronoTime(deadline));
    server_->Wait();
  }

 private:
  const int threads_max_;
  AdminCalls calls_;
  std::unique_ptr<grpc::Server> server_;
};

class Server final : public AdminServer {
 public:
  Server(AdminService* service, const Limits& limits, TokenCheck tokens)
      : service_(service),
        tokens_(std::move(tokens)),
        uids_(limits.connections_of_user),
        timer_(limits.calls) {}
  ~Server() override { Shutdown(absl::Now()); }

  absl::Status Start();
  absl::Status Serve(UniqueFd connection, const Caller& caller,
                     const std::string& name) override;
  void Refuse(UniqueFd connection, const absl::Status& why) override;
  void SetUnhealthy() override;
  void Shutdown(absl::Time deadline) override;

 private:
  absl::Status TryServe(UniqueFd* connection, const Caller& caller,
                        const std::string& name);
  absl::StatusOr<CallersServer*> Find(const Caller& caller)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes room for one more server; false: all servers have connections.
  bool DropIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  AdminService* const service_;
  const TokenCheck tokens_;
  ConnectionUids uids_;
  CallTimer timer_;
  std::unique_ptr<GrpcGate> gate_;
  absl::Mutex mutex_;
  bool unhealthy_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<Caller, std::unique_ptr<CallersServer>> servers_
      ABSL_GUARDED_BY(mutex_);
  size_t stranger_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // Server of the callers without one of their own.
  std::unique_ptr<CallersServer> shared_ ABSL_GUARDED_BY(mutex_);
};

absl::Status Server::Start() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  OPTSTATE_ASSIGN_OR_RETURN(gate_, GrpcGate::Start());
  // The first server is started at once, so that a daemon that cannot serve
  // does not start.
  absl::MutexLock lock(&mutex_);
  return Find(access::UnixCaller(::geteuid())).status();
}

bool Server::DropIdle() {
  for (auto it = servers_.begin(); it != servers_.end(); ++it) {
    if (KeepsServer(it->first) || uids_.CountOpen(it->first) != 0) continue;
    servers_.erase(it);
    --stranger_count_;
    return true;
  }
  return false;
}

absl::StatusOr<CallersServer*> Server::Find(const Caller& caller) {
  const auto found = servers_.find(caller);
  if (found != servers_.end()) return found->second.get();
  // A user without a role takes no place of those who have one.
  const bool is_shared =
      (caller.is_local() && caller.role == access::Role::kNone) ||
      (!KeepsServer(caller) && stranger_count_ >= kServersMax && !DropIdle());
  if (is_shared && shared_ != nullptr) return shared_.get();
  auto server = std::make_unique<CallersServer>(
      service_, &uids_, tokens_,
      caller.is_operator() ? kOperatorThreadsMax : kThreadsMax);
  OPTSTATE_RETURN_IF_ERROR(server->Start(&timer_));
  if (unhealthy_) server->SetUnhealthy();
  CallersServer* const raw = server.get();
  if (is_shared) {
    shared_ = std::move(server);
  } else {
    servers_[caller] = std::move(server);
    if (!KeepsServer(caller)) ++stranger_count_;
  }
  return raw;
}

absl::Status Server::TryServe(UniqueFd* connection, const Caller& caller,
                              const std::string& name) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return absl::UnavailableError("the daemon ends");
  OPTSTATE_RETURN_IF_ERROR(uids_.CheckRoom(caller));
  OPTSTATE_ASSIGN_OR_RETURN(CallersServer* const server, Find(caller));
  OPTSTATE_ASSIGN_OR_RETURN(
      UniqueFd inside,
      gate_->Guard(std::move(*connection), caller.is_operator() ? "" : name));
  OPTSTATE_ASSIGN_OR_RETURN(const int fd,
                            uids_.Move(std::move(inside), caller));
  server->Serve(fd);
  return absl::OkStatus();
}

absl::Status Server::Serve(UniqueFd connection, const Caller& caller,
                           const std::string& name) {
  const absl::Status status = TryServe(&connection, caller, name);
  if (!status.ok() && connection.ok()) Refuse(std::move(connection), status);
  return status;
}

void Server::Refuse(UniqueFd connection, const absl::Status& why) {
  observe::Count(observe::Answered::kGrpcConnection, why.code());
  gate_->Refuse(std::move(connection), why);
}

void Server::SetUnhealthy() {
  absl::MutexLock lock(&mutex_);
  unhealthy_ = true;
  for (const auto& [caller, server] : servers_) server->SetUnhealthy();
  if (shared_ != nullptr) shared_->SetUnhealthy();
}

void Server::Shutdown(absl::Time deadline) {
  std::vector<std::unique_ptr<CallersServer>> servers;
  {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    for (auto& [caller, server] : servers_) {
      servers.push_back(std::move(server));
    }
    servers_.clear();
    if (shared_ != nullptr) servers.push_back(std::move(shared_));
  }
  for (const auto& server : servers) server->EndEventStreams();
  for (const auto& server : servers) server->Shutdown(deadline);
  if (gate_ != nullptr) gate_->Flush(absl::Now() + kFlushTimeout);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(
    AdminService* service, const Limits& limits, TokenCheck tokens) {
  auto server = std::make_unique<Server>(service, limits, std::move(tokens));
  OPTSTATE_RETURN_IF_ERROR(server->Start());
  return server;
}

}  // namespace optstate::admin
