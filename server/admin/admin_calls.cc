#include "server/admin/admin_calls.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/grpc_status.h"
#include "server/observe/peer_log.h"

namespace optstate::admin {
namespace {

// The deadline of a caller that sets none.
constexpr absl::Duration kCallMax = absl::Minutes(5);

// Calls end a little before the caller's deadline, so that the final answer
// arrives: a caller whose deadline has passed learns only that.
constexpr absl::Duration kAnswerTimeMax = absl::Milliseconds(500);

absl::Time Deadline(const grpc::ServerContext& context) {
  const absl::Time now = absl::Now();
  const absl::Duration patience =
      std::min(absl::FromChrono(context.deadline()) - now, kCallMax);
  return now + patience - std::min(patience / 4, kAnswerTimeMax);
}

// Converts a result to gRPC's status and reply.
template <typename T>
grpc::Status Answer(absl::StatusOr<T> result, T* reply) {
  if (!result.ok()) return ToGrpc(result.status());
  *reply = *std::move(result);
  return grpc::Status::OK;
}

}  // namespace

grpc::Status AdminCalls::GetStatus(grpc::ServerContext* context,
                                   const v1::GetStatusRequest*,
                                   v1::ServerStatus* reply) {
  *reply = service_->GetStatus(Deadline(*context));
  return grpc::Status::OK;
}

grpc::Status AdminCalls::ListJobs(grpc::ServerContext* context,
                                  const v1::ListJobsRequest*,
                                  v1::ListJobsReply* reply) {
  *reply = service_->ListJobs(Deadline(*context));
  return grpc::Status::OK;
}

grpc::Status AdminCalls::GetJob(grpc::ServerContext* context,
                                const v1::GetJobRequest* request,
                                v1::Job* reply) {
  return Answer(
      service_->GetJob(request->name(), Deadline(*context), request->memory()),
      reply);
}

grpc::Status AdminCalls::ListSessions(grpc::ServerContext* context,
                                      const v1::ListSessionsRequest* request,
                                      v1::ListSessionsReply* reply) {
  return Answer(service_->ListSessions(request->job(), Deadline(*context)),
                reply);
}

grpc::Status AdminCalls::ListParameters(
    grpc::ServerContext* context, const v1::ListParametersRequest* request,
    v1::ListParametersReply* reply) {
  return Answer(service_->ListParameters(*request, Deadline(*context)), reply);
}

grpc::Status AdminCalls::DeleteJob(grpc::ServerContext* context,
                                   const v1::DeleteJobRequest* request,
                                   v1::DeleteJobReply*) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  const absl::Status status = service_->DeleteJob(
      request->name(), request->force(), caller->uid, Deadline(*context));
  observe::LogOfPeer(
      spdlog::level::info, "delete job", absl::StrCat("uid ", caller->uid),
      "delete job \"{}\"{} by uid {}: {}", absl::CHexEscape(request->name()),
      request->force() ? " (forced)" : "", caller->uid, status.ToString());
  return ToGrpc(status);
}

grpc::Status AdminCalls::RecoverJob(grpc::ServerContext* context,
                                    const v1::RecoverJobRequest* request,
                                    v1::RecoverJobReply* reply) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  const absl::Status status = service_->RecoverJob(
      request->name(), caller->uid, request->to_durable(), Deadline(*context));
  reply->set_to_durable(request->to_durable());
  observe::LogOfPeer(
      spdlog::level::info, "recover job", absl::StrCat("uid ", caller->uid),
      "recover job \"{}\"{} by uid {}: {}", absl::CHexEscape(request->name()),
      request->to_durable() ? " at its durable step" : "", caller->uid,
      status.ToString());
  return ToGrpc(status);
}

grpc::Status AdminCalls::SetJob(grpc::ServerContext* context,
                                const v1::SetJobRequest* request,
                                v1::SetJobReply* reply) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  auto result = service_->SetJob(*request, caller->uid, Deadline(*context));
  observe::LogOfPeer(
      spdlog::level::info, "set job", absl::StrCat("uid ", caller->uid),
      "set job \"{}\" by uid {}: {}", absl::CHexEscape(request->name()),
      caller->uid, result.status().ToString());
  return Answer(std::move(result), reply);
}

grpc::Status AdminCalls::SleepJob(
    grpc::ServerContext* context, const v1::SleepJobRequest* request,
    grpc::ServerWriter<v1::SleepProgress>* writer) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  const absl::Status status =
      service_->SleepJob(request->name(), caller->uid, Deadline(*context),
                         [writer](const v1::SleepProgress& progress) {
                           return writer->Write(progress);
                         });
  observe::LogOfPeer(
      spdlog::level::info, "sleep job", absl::StrCat("uid ", caller->uid),
      "sleep job \"{}\" by uid {}: {}", absl::CHexEscape(request->name()),
      caller->uid, status.ToString());
  return ToGrpc(status);
}

grpc::Status AdminCalls::WakeJob(
    grpc::ServerContext* context, const v1::WakeJobRequest* request,
    grpc::ServerWriter<v1::SleepProgress>* writer) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  const absl::Status status =
      service_->WakeJob(request->name(), caller->uid,
                        [writer](const v1::SleepProgress& progress) {
                          return writer->Write(progress);
                        });
  observe::LogOfPeer(
      spdlog::level::info, "wake job", absl::StrCat("uid ", caller->uid),
      "wake job \"{}\" by uid {}: {}", absl::CHexEscape(request->name()),
      caller->uid, status.ToString());
  return ToGrpc(status);
}

grpc::Status AdminCalls::VerifyJob(
    grpc::ServerContext* context, const v1::VerifyJobRequest* request,
    grpc::ServerWriter<v1::VerifyJobProgress>* writer) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  const auto log = [&](const std::string& what) {
    observe::LogOfPeer(spdlog::level::info, "verify job",
                       absl::StrCat("uid ", caller->uid),
                       "verify job \"{}\" by uid {}: {}",
                       absl::CHexEscape(request->name()), caller->uid, what);
  };
  log("asked for");
  const absl::Status status =
      service_->VerifyJob(request->name(), caller->uid, context,
                          [writer](const v1::VerifyJobProgress& progress) {
                            return writer->Write(progress);
                          });
  log(status.ToString());
  return ToGrpc(status);
}

grpc::Status AdminCalls::DescribeTiers(grpc::ServerContext* context,
                                       const v1::DescribeTiersRequest* request,
                                       v1::DescribeTiersReply* reply) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  return Answer(service_->DescribeTiers(*request, caller->uid), reply);
}

grpc::Status AdminCalls::DescribeDevices(grpc::ServerContext* context,
                                         const v1::DescribeDevicesRequest*,
                                         v1::DescribeDevicesReply* reply) {
  *reply = service_->DescribeDevices(Deadline(*context));
  return grpc::Status::OK;
}

grpc::Status AdminCalls::Upgrade(grpc::ServerContext* context,
                                 const v1::UpgradeRequest* request,
                                 v1::UpgradeReply* reply) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  auto result =
      service_->Upgrade(request->binary(), caller->uid, caller->is_local);
  observe::LogOfPeer(
      spdlog::level::info, "upgrade", absl::StrCat("uid ", caller->uid),
      "upgrade to \"{}\" by uid {}: {}", absl::CHexEscape(request->binary()),
      caller->uid, result.status().ToString());
  return Answer(std::move(result), reply);
}

grpc::Status AdminCalls::Drain(grpc::ServerContext* context,
                               const v1::DrainRequest* request,
                               v1::DrainReply* reply) {
  const absl::StatusOr<Caller> caller = uids_->Find(context->peer());
  if (!caller.ok()) return ToGrpc(caller.status());
  absl::StatusOr<v1::DrainReply> result =
      service_->Drain(*request, caller->uid, Deadline(*context), context);
  observe::LogOfPeer(spdlog::level::info, "drain",
                     absl::StrCat("uid ", caller->uid), "{} by uid {}: {}",
                     request->resume() ? "resume" : "drain", caller->uid,
                     result.status().ToString());
  return Answer(std::move(result), reply);
}

grpc::Status AdminCalls::WatchEvents(grpc::ServerContext* context,
                                     const v1::WatchEventsRequest* request,
                                     grpc::ServerWriter<v1::Event>* writer) {
  return ToGrpc(event_streams_.Send(
      *request, Deadline(*context), context,
      [writer](const v1::Event& event) { return writer->Write(event); }));
}

}  // namespace optstate::admin
