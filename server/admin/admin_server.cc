#include "server/admin/admin_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_posix.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "proto/types/grpc_status.h"
#include "proto/types/status_macros.h"

namespace optstate::admin {
namespace {

// Calls that run at once; a drain or a deletion keeps one busy for its time.
constexpr int kThreadsMax = 16;
// A request is a name and a few numbers.
constexpr int kRequestBytesMax = 64 << 10;
// For a caller that sets no deadline.
constexpr absl::Duration kCallMax = absl::Minutes(5);

// A little before the caller's, for what is said at the end to arrive: whoever
// has given up hears only that it was late.
constexpr absl::Duration kAnswerTimeMax = absl::Milliseconds(500);

absl::Time Deadline(const grpc::ServerContext& context) {
  const absl::Time now = absl::Now();
  const absl::Duration patience =
      std::min(absl::FromChrono(context.deadline()) - now, kCallMax);
  return now + patience - std::min(patience / 4, kAnswerTimeMax);
}

// Puts a result where gRPC wants it.
template <typename T>
grpc::Status Answer(absl::StatusOr<T> result, T* reply) {
  if (!result.ok()) return ToGrpc(result.status());
  *reply = *std::move(result);
  return grpc::Status::OK;
}

class Server final : public AdminServer, public v1::Admin::Service {
 public:
  explicit Server(AdminService* service) : service_(service) {}
  ~Server() override { Shutdown(absl::Now()); }

  absl::Status Start();
  absl::Status Serve(UniqueFd connection, const Caller& caller) override;
  void SetUnhealthy() override;
  void Shutdown(absl::Time deadline) override;

  grpc::Status GetStatus(grpc::ServerContext* context,
                         const v1::GetStatusRequest* request,
                         v1::ServerStatus* reply) override;
  grpc::Status ListJobs(grpc::ServerContext* context,
                        const v1::ListJobsRequest* request,
                        v1::ListJobsReply* reply) override;
  grpc::Status GetJob(grpc::ServerContext* context,
                      const v1::GetJobRequest* request,
                      v1::Job* reply) override;
  grpc::Status ListSessions(grpc::ServerContext* context,
                            const v1::ListSessionsRequest* request,
                            v1::ListSessionsReply* reply) override;
  grpc::Status ListParameters(grpc::ServerContext* context,
                              const v1::ListParametersRequest* request,
                              v1::ListParametersReply* reply) override;
  grpc::Status DeleteJob(grpc::ServerContext* context,
                         const v1::DeleteJobRequest* request,
                         v1::DeleteJobReply* reply) override;
  grpc::Status RecoverJob(grpc::ServerContext* context,
                          const v1::RecoverJobRequest* request,
                          v1::RecoverJobReply* reply) override;
  grpc::Status Upgrade(grpc::ServerContext* context,
                       const v1::UpgradeRequest* request,
                       v1::UpgradeReply* reply) override;
  grpc::Status Drain(grpc::ServerContext* context,
                     const v1::DrainRequest* request,
                     v1::DrainReply* reply) override;

 private:
  AdminService* const service_;
  ConnectionUids uids_;
  std::unique_ptr<grpc::Server> server_;
};

absl::Status Server::Start() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ResourceQuota quota("admin");
  quota.SetMaxThreads(kThreadsMax);
  grpc::ServerBuilder builder;
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(kRequestBytesMax);
  builder.SetMaxSendMessageSize(-1);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  builder.RegisterService(static_cast<v1::Admin::Service*>(this));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::InternalError("the gRPC server of Admin did not start");
  }
  // Known by itself is "" alone. SetUnhealthy is about both.
  server_->GetHealthCheckService()->SetServingStatus(
      v1::Admin::service_full_name(), true);
  return absl::OkStatus();
}

absl::Status Server::Serve(UniqueFd connection, const Caller& caller) {
  OPTSTATE_ASSIGN_OR_RETURN(const int fd,
                            uids_.Move(std::move(connection), caller));
  grpc::AddInsecureChannelFromFd(server_.get(), fd);
  return absl::OkStatus();
}

void Server::SetUnhealthy() {
  server_->GetHealthCheckService()->SetServingStatus(false);
}

void Server::Shutdown(absl::Time deadline) {
  if (server_ == nullptr) return;
  server_->Shutdown(absl::ToChronoTime(deadline));
  server_->Wait();
}

grpc::Status Server::GetStatus(grpc::ServerContext* context,
                               const v1::GetStatusRequest*,
                               v1::ServerStatus* reply) {
  *reply = service_->GetStatus(Deadline(*context));
  return grpc::Status::OK;
}

grpc::Status Server::ListJobs(grpc::ServerContext* context,
                              const v1::ListJobsRequest*,
                              v1::ListJobsReply* reply) {
  *reply = service_->ListJobs(Deadline(*context));
  return grpc::Status::OK;
}

grpc::Status Server::GetJob(grpc::ServerContext* context,
                            const v1::GetJobRequest* request, v1::Job* reply) {
  return Answer(
      service_->GetJob(request->name(), Deadline(*context), request->memory()),
      reply);
}

grpc::Status Server::ListSessions(grpc::ServerContext* context,
                                  const v1::ListSessionsRequest* request,
                                  v1::ListSessionsReply* reply) {
  return Answer(service_->ListSessions(request->job(), Deadline(*context)),
                reply);
}

grpc::Status Server::ListParameters(grpc::ServerContext* context,
                                    const v1::ListParametersRequest* request,
                                    v1::ListParametersReply* reply) {
  return Answer(service_->ListParameters(*request, Deadline(*context)), reply);
}

grpc::Status Server::DeleteJob(grpc::ServerContext* context,
                               const v1::DeleteJobRequest* request,
                               v1::DeleteJobReply*) {
  const absl::StatusOr<Caller> caller = uids_.Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  const absl::Status status = service_->DeleteJob(
      request->name(), request->force(), caller->uid, Deadline(*context));
  spdlog::info(
      "delete job \"{}\"{} by uid {}: {}", absl::CHexEscape(request->name()),
      request->force() ? " (forced)" : "", caller->uid, status.ToString());
  return ToGrpc(status);
}

grpc::Status Server::RecoverJob(grpc::ServerContext* context,
                                const v1::RecoverJobRequest* request,
                                v1::RecoverJobReply*) {
  const absl::StatusOr<Caller> caller = uids_.Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  const absl::Status status =
      service_->RecoverJob(request->name(), caller->uid, Deadline(*context));
  spdlog::info("recover job \"{}\" by uid {}: {}",
               absl::CHexEscape(request->name()), caller->uid,
               status.ToString());
  return ToGrpc(status);
}

grpc::Status Server::Upgrade(grpc::ServerContext* context,
                             const v1::UpgradeRequest* request,
                             v1::UpgradeReply* reply) {
  const absl::StatusOr<Caller> caller = uids_.Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  auto result =
      service_->Upgrade(request->binary(), caller->uid, caller->is_local);
  spdlog::info("upgrade to \"{}\" by uid {}: {}",
               absl::CHexEscape(request->binary()), caller->uid,
               result.status().ToString());
  return Answer(std::move(result), reply);
}

grpc::Status Server::Drain(grpc::ServerContext* context,
                           const v1::DrainRequest* request,
                           v1::DrainReply* reply) {
  const absl::StatusOr<Caller> caller = uids_.Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  absl::StatusOr<v1::DrainReply> result =
      service_->Drain(*request, caller->uid, Deadline(*context), context);
  spdlog::info("{} by uid {}: {}", request->resume() ? "resume" : "drain",
               caller->uid, result.status().ToString());
  return Answer(std::move(result), reply);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(
    AdminService* service) {
  auto server = std::make_unique<Server>(service);
  OPTSTATE_RETURN_IF_ERROR(server->Start());
  return server;
}

}  // namespace optstate::admin
