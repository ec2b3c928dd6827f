#include "server/admin/admin_calls.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "proto/types/grpc_status.h"
#include "proto/types/status_macros.h"
#include "server/admin/audit.h"
#include "server/admin/method_roles.h"
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

// Returns the call's token; "": it has none.
absl::string_view TokenOf(const grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  if (found == metadata.end()) return "";
  absl::string_view value(found->second.data(), found->second.size());
  return absl::ConsumePrefix(&value, "Bearer ") ? value : "";
}

// Metadata by which a caller says how many milliseconds old what engines have
// said may be; without it, it is of the call itself.
constexpr char kAgeMaxKey[] = "optstate-max-age-ms";

absl::StatusOr<absl::Duration> AgeMaxOf(const grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kAgeMaxKey);
  if (found == metadata.end()) return absl::ZeroDuration();
  const absl::string_view value(found->second.data(), found->second.size());
  uint32_t age_max_ms = 0;
  if (absl::SimpleAtoi(value, &age_max_ms)) {
    return absl::Milliseconds(age_max_ms);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("metadata ", kAgeMaxKey, " is \"", absl::CHexEscape(value),
                   "\": say a whole number of milliseconds, or leave it out"));
}

std::string Flag(const char* name, bool is_set) {
  return is_set ? absl::StrCat(name, "=true") : "";
}

// Returns what the request sets, in words of a log line.
std::string DetailOf(const v1::SetJobRequest& request) {
  v1::SetJobRequest settings = request;
  settings.clear_name();
  settings.clear_access_before();  // it sets nothing
  return absl::StrCat("settings=\"",
                      absl::CHexEscape(settings.ShortDebugString()), "\"");
}

}  // namespace

absl::StatusOr<Caller> AdminCalls::FindCaller(
    const grpc::ServerContext& context) const {
  OPTSTATE_ASSIGN_OR_RETURN(Caller caller, uids_->Find(context.peer()));
  const bool is_unknown =
      caller.via == access::Via::kTls && caller.identity.empty();
  const absl::string_view token = TokenOf(context);
  if (!is_unknown || token.empty() || tokens_ == nullptr) return caller;
  return tokens_(token);
}

absl::StatusOr<Caller> AdminCalls::Authorize(const grpc::ServerContext& context,
                                             absl::string_view method) const {
  absl::StatusOr<Caller> caller = FindCaller(context);
  absl::Status status = caller.status();
  if (status.ok()) status = CheckMethod(method, *caller);
  if (status.ok()) return caller;
  // The lines of the audit are about changes alone, and a client whose token is
  // none of the daemon's, or a user without a role, may only have looked.
  const bool is_unknown = absl::IsUnauthenticated(status);
  if (is_unknown || (caller.ok() && caller->role == access::Role::kNone)) {
    observe::LogOfPeer(spdlog::level::info, "call refused",
                       is_unknown ? "clients of no name" : caller->name(),
                       "call refused: method={}: {}", std::string(method),
                       status.ToString());
  }
  return status;
}

template <typename Reply, typename Function>
grpc::Status AdminCalls::Look(const grpc::ServerContext& context,
                              absl::string_view method, Reply* reply,
                              const Function& answer) const {
  const absl::StatusOr<Caller> caller = Authorize(context, method);
  if (!caller.ok()) return ToGrpc(caller.status());
  absl::StatusOr<Reply> result = answer(*caller);
  if (!result.ok()) return ToGrpc(result.status());
  *reply = *std::move(result);
  return grpc::Status::OK;
}

template <typename Function>
grpc::Status AdminCalls::Act(const grpc::ServerContext& context,
                             absl::string_view method, const std::string& job,
                             const std::string& detail,
                             const Function& change) const {
  const absl::StatusOr<Caller> caller = FindCaller(context);
  absl::Status status = caller.status();
  if (status.ok()) status = CheckMethod(method, *caller);
  if (status.ok()) status = change(*caller);
  Audit({.method = std::string(method),
         .actor = caller.ok() ? caller->name() : "unknown",
         .job = job,
         .detail = detail},
        status);
  return ToGrpc(status);
}

grpc::Status AdminCalls::GetStatus(grpc::ServerContext* context,
                                   const v1::GetStatusRequest*,
                                   v1::ServerStatus* reply) {
  return Look(*context, "GetStatus", reply,
              [&](const Caller& caller) -> absl::StatusOr<v1::ServerStatus> {
                OPTSTATE_ASSIGN_OR_RETURN(const absl::Duration age_max,
                                          AgeMaxOf(*context));
                return service_->GetStatus(caller, Deadline(*context), age_max);
              });
}

grpc::Status AdminCalls::ListJobs(grpc::ServerContext* context,
                                  const v1::ListJobsRequest*,
                                  v1::ListJobsReply* reply) {
  return Look(*context, "ListJobs", reply,
              [&](const Caller& caller) -> absl::StatusOr<v1::ListJobsReply> {
                OPTSTATE_ASSIGN_OR_RETURN(const absl::Duration age_max,
                                          AgeMaxOf(*context));
                return service_->ListJobs(caller, Deadline(*context), age_max);
              });
}

grpc::Status AdminCalls::GetJob(grpc::ServerContext* context,
                                const v1::GetJobRequest* request,
                                v1::Job* reply) {
  return Look(*context, "GetJob", reply,
              [&](const Caller& caller) -> absl::StatusOr<v1::Job> {
                OPTSTATE_ASSIGN_OR_RETURN(const absl::Duration age_max,
                                          AgeMaxOf(*context));
                return service_->GetJob(request->name(), caller,
                                        Deadline(*context), request->memory(),
                                        age_max);
              });
}

grpc::Status AdminCalls::ListSessions(grpc::ServerContext* context,
                                      const v1::ListSessionsRequest* request,
                                      v1::ListSessionsReply* reply) {
  return Look(
      *context, "ListSessions", reply,
      [&](const Caller& caller) -> absl::StatusOr<v1::ListSessionsReply> {
        OPTSTATE_ASSIGN_OR_RETURN(const absl::Duration age_max,
                                  AgeMaxOf(*context));
        return service_->ListSessions(request->job(), caller,
                                      Deadline(*context), age_max);
      });
}

grpc::Status AdminCalls::ListParameters(
    grpc::ServerContext* context, const v1::ListParametersRequest* request,
    v1::ListParametersReply* reply) {
  return Look(*context, "ListParameters", reply, [&](const Caller& caller) {
    return service_->ListParameters(*request, caller, Deadline(*context));
  });
}

grpc::Status AdminCalls::DeleteJob(grpc::ServerContext* context,
                                   const v1::DeleteJobRequest* request,
                                   v1::DeleteJobReply*) {
  return Act(*context, "DeleteJob", request->name(),
             Flag("force", request->force()), [&](const Caller& caller) {
               return service_->DeleteJob(request->name(), request->force(),
                                          caller, Deadline(*context));
             });
}

// Its rule and its lines of the audit are those of DeleteJob: the two differ in
// what the caller is told meanwhile.
grpc::Status AdminCalls::DeleteJobWatched(
    grpc::ServerContext* context, const v1::DeleteJobRequest* request,
    grpc::ServerWriter<v1::DeleteProgress>* writer) {
  return Act(*context, "DeleteJob", request->name(),
             Flag("force", request->force()), [&](const Caller& caller) {
               return service_->DeleteJobWatched(
                   request->name(), request->force(), caller,
                   Deadline(*context),
                   [writer](const v1::DeleteProgress& progress) {
                     return writer->Write(progress);
                   });
             });
}

grpc::Status AdminCalls::RecoverJob(grpc::ServerContext* context,
                                    const v1::RecoverJobRequest* request,
                                    v1::RecoverJobReply* reply) {
  reply->set_to_durable(request->to_durable());
  return Act(
      *context, "RecoverJob", request->name(),
      Flag("to_durable", request->to_durable()), [&](const Caller& caller) {
        return service_->RecoverJob(request->name(), caller,
                                    request->to_durable(), Deadline(*context));
      });
}

grpc::Status AdminCalls::SetJob(grpc::ServerContext* context,
                                const v1::SetJobRequest* request,
                                v1::SetJobReply* reply) {
  return Act(*context, "SetJob", request->name(), DetailOf(*request),
             [&](const Caller& caller) -> absl::Status {
               OPTSTATE_ASSIGN_OR_RETURN(
                   *reply,
                   service_->SetJob(*request, caller, Deadline(*context)));
               return absl::OkStatus();
             });
}

grpc::Status AdminCalls::SleepJob(
    grpc::ServerContext* context, const v1::SleepJobRequest* request,
    grpc::ServerWriter<v1::SleepProgress>* writer) {
  return Act(
      *context, "SleepJob", request->name(), "", [&](const Caller& caller) {
        return service_->SleepJob(request->name(), caller, Deadline(*context),
                                  [writer](const v1::SleepProgress& progress) {
                                    return writer->Write(progress);
                                  });
      });
}

grpc::Status AdminCalls::WakeJob(
    grpc::ServerContext* context, const v1::WakeJobRequest* request,
    grpc::ServerWriter<v1::SleepProgress>* writer) {
  return Act(
      *context, "WakeJob", request->name(), "", [&](const Caller& caller) {
        return service_->WakeJob(request->name(), caller,
                                 [writer](const v1::SleepProgress& progress) {
                                   return writer->Write(progress);
                                 });
      });
}

grpc::Status AdminCalls::VerifyJob(
    grpc::ServerContext* context, const v1::VerifyJobRequest* request,
    grpc::ServerWriter<v1::VerifyJobProgress>* writer) {
  return Act(
      *context, "VerifyJob", request->name(), "", [&](const Caller& caller) {
        // It may last, and the line of the audit comes at its end.
        observe::LogOfPeer(spdlog::level::info, "verify job", caller.name(),
                           "verify job \"{}\" by {}: asked for",
                           absl::CHexEscape(request->name()),
                           absl::CHexEscape(caller.name()));
        return service_->VerifyJob(
            request->name(), caller, context,
            [writer](const v1::VerifyJobProgress& progress) {
              return writer->Write(progress);
            });
      });
}

grpc::Status AdminCalls::TraceJob(grpc::ServerContext* context,
                                  const v1::TraceJobRequest* request,
                                  grpc::ServerWriter<v1::TraceChunk>* writer) {
  return Act(*context, "TraceJob", request->name(),
             absl::StrCat("steps=", request->steps()),
             [&](const Caller& caller) {
               return service_->TraceJob(*request, caller, context,
                                         [writer](const v1::TraceChunk& chunk) {
                                           return writer->Write(chunk);
                                         });
             });
}

grpc::Status AdminCalls::DescribeTiers(grpc::ServerContext* context,
                                       const v1::DescribeTiersRequest* request,
                                       v1::DescribeTiersReply* reply) {
  return Look(*context, "DescribeTiers", reply, [&](const Caller& caller) {
    return service_->DescribeTiers(*request, caller);
  });
}

grpc::Status AdminCalls::DescribeDevices(grpc::ServerContext* context,
                                         const v1::DescribeDevicesRequest*,
                                         v1::DescribeDevicesReply* reply) {
  return Look(
      *context, "DescribeDevices", reply,
      [&](const Caller& caller) -> absl::StatusOr<v1::DescribeDevicesReply> {
        return service_->DescribeDevices(caller, Deadline(*context));
      });
}

grpc::Status AdminCalls::ListUsers(grpc::ServerContext* context,
                                   const v1::ListUsersRequest* request,
                                   v1::ListUsersReply* reply) {
  return Look(*context, "ListUsers", reply, [&](const Caller& caller) {
    return service_->ListUsers(*request, caller, Deadline(*context));
  });
}

grpc::Status AdminCalls::Upgrade(grpc::ServerContext* context,
                                 const v1::UpgradeRequest* request,
                                 v1::UpgradeReply* reply) {
  const std::string detail =
      absl::StrCat("binary=\"", absl::CHexEscape(request->binary()), "\"");
  return Act(*context, "Upgrade", "", detail,
             [&](const Caller& caller) -> absl::Status {
               OPTSTATE_ASSIGN_OR_RETURN(
                   *reply, service_->Upgrade(request->binary(), caller));
               return absl::OkStatus();
             });
}

grpc::Status AdminCalls::Drain(grpc::ServerContext* context,
                               const v1::DrainRequest* request,
                               v1::DrainReply* reply) {
  return Act(*context, "Drain", "", Flag("resume", request->resume()),
             [&](const Caller& caller) -> absl::Status {
               OPTSTATE_ASSIGN_OR_RETURN(
                   *reply, service_->Drain(*request, caller, Deadline(*context),
                                           context));
               return absl::OkStatus();
             });
}

grpc::Status AdminCalls::WatchEvents(grpc::ServerContext* context,
                                     const v1::WatchEventsRequest* request,
                                     grpc::ServerWriter<v1::Event>* writer) {
  const absl::StatusOr<Caller> caller = Authorize(*context, "WatchEvents");
  if (!caller.ok()) return ToGrpc(caller.status());
  return ToGrpc(event_streams_.Send(
      *request, Deadline(*context), context,
      [this, writer, &caller](const v1::Event& event) {
        return !service_->MaySee(event, &*caller) || writer->Write(event);
      }));
}

}  // namespace optstate::admin
