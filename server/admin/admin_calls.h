#ifndef OPTSTATE_SERVER_ADMIN_ADMIN_CALLS_H_
#define OPTSTATE_SERVER_ADMIN_ADMIN_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "server/admin/admin_service.h"
#include "server/admin/connection_uids.h"
#include "server/admin/event_streams.h"
#include "server/observe/event_log.h"

namespace optstate::admin {

// Finds who shows a token. UNAUTHENTICATED: nobody that the daemon knows.
using TokenCheck = std::function<absl::StatusOr<Caller>(absl::string_view)>;

// The Admin service as gRPC calls it: determines each call's caller and
// deadline, checks the caller's role (method_roles.h), passes the call to
// AdminService, and writes down who asked for which change. Events are sent
// from here.
//
// Threads: thread-safe.
class AdminCalls final : public v1::Admin::Service {
 public:
  // `service` and `uids` outlive the object. `tokens` is null where callers
  // have none. `event_streams_max`: how many WatchEvents may run at once, each
  // on a thread.
  AdminCalls(AdminService* service, const ConnectionUids* uids,
             TokenCheck tokens, size_t event_streams_max)
      : service_(service),
        uids_(uids),
        tokens_(std::move(tokens)),
        event_streams_(&observe::Events(), event_streams_max) {}

  // Ends all WatchEvents, now and later.
  void EndEventStreams() { event_streams_.End(); }

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
  grpc::Status DeleteJobWatched(
      grpc::ServerContext* context, const v1::DeleteJobRequest* request,
      grpc::ServerWriter<v1::DeleteProgress>* writer) override;
  grpc::Status RecoverJob(grpc::ServerContext* context,
                          const v1::RecoverJobRequest* request,
                          v1::RecoverJobReply* reply) override;
  grpc::Status SetJob(grpc::ServerContext* context,
                      const v1::SetJobRequest* request,
                      v1::SetJobReply* reply) override;
  grpc::Status SleepJob(grpc::ServerContext* context,
                        const v1::SleepJobRequest* request,
                        grpc::ServerWriter<v1::SleepProgress>* writer) override;
  grpc::Status WakeJob(grpc::ServerContext* context,
                       const v1::WakeJobRequest* request,
                       grpc::ServerWriter<v1::SleepProgress>* writer) override;
  grpc::Status VerifyJob(
      grpc::ServerContext* context, const v1::VerifyJobRequest* request,
      grpc::ServerWriter<v1::VerifyJobProgress>* writer) override;
  grpc::Status TraceJob(grpc::ServerContext* context,
                        const v1::TraceJobRequest* request,
                        grpc::ServerWriter<v1::TraceChunk>* writer) override;
  grpc::Status DescribeTiers(grpc::ServerContext* context,
                             const v1::DescribeTiersRequest* request,
                             v1::DescribeTiersReply* reply) override;
  grpc::Status DescribeDevices(grpc::ServerContext* context,
                               const v1::DescribeDevicesRequest* request,
                               v1::DescribeDevicesReply* reply) override;
  grpc::Status ListUsers(grpc::ServerContext* context,
                         const v1::ListUsersRequest* request,
                         v1::ListUsersReply* reply) override;
  grpc::Status Upgrade(grpc::ServerContext* context,
                       const v1::UpgradeRequest* request,
                       v1::UpgradeReply* reply) override;
  grpc::Status Drain(grpc::ServerContext* context,
                     const v1::DrainRequest* request,
                     v1::DrainReply* reply) override;
  grpc::Status WatchEvents(grpc::ServerContext* context,
                           const v1::WatchEventsRequest* request,
                           grpc::ServerWriter<v1::Event>* writer) override;

 private:
  absl::StatusOr<Caller> FindCaller(const grpc::ServerContext& context) const;
  // Finds the caller, who may call the method. Every call begins with this, or
  // with one of the two below.
  absl::StatusOr<Caller> Authorize(const grpc::ServerContext& context,
                                   absl::string_view method) const;
  // Answers a call that changes nothing; `answer` takes the caller and returns
  // a StatusOr of the reply.
  template <typename Reply, typename Function>
  grpc::Status Look(const grpc::ServerContext& context,
                    absl::string_view method, Reply* reply,
                    const Function& answer) const;
  // Answers a call that changes something, and writes that down; `change` takes
  // the caller and returns a Status.
  template <typename Function>
  grpc::Status Act(const grpc::ServerContext& context, absl::string_view method,
                   const std::string& job, const std::string& detail,
                   const Function& change) const;

  AdminService* const service_;
  const ConnectionUids* const uids_;
  const TokenCheck tokens_;
  EventStreams event_streams_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_ADMIN_CALLS_H_
