#ifndef OPTSTATE_SERVER_ADMIN_ADMIN_CALLS_H_
#define OPTSTATE_SERVER_ADMIN_ADMIN_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <cstddef>

#include "optstate/v1/admin.grpc.pb.h"
#include "server/admin/admin_service.h"
#include "server/admin/connection_uids.h"
#include "server/admin/event_streams.h"
#include "server/observe/event_log.h"

namespace optstate::admin {

// The Admin service as gRPC calls it: determines each call's caller and
// deadline, and passes the call to AdminService. Events are sent from here.
//
// Threads: thread-safe.
class AdminCalls final : public v1::Admin::Service {
 public:
  // `service` and `uids` outlive the object. `event_streams_max`: how many
  // WatchEvents may run at once, each on a thread.
  AdminCalls(AdminService* service, const ConnectionUids* uids,
             size_t event_streams_max)
      : service_(service),
        uids_(uids),
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
  grpc::Status DescribeTiers(grpc::ServerContext* context,
                             const v1::DescribeTiersRequest* request,
                             v1::DescribeTiersReply* reply) override;
  grpc::Status DescribeDevices(grpc::ServerContext* context,
                               const v1::DescribeDevicesRequest* request,
                               v1::DescribeDevicesReply* reply) override;
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
  AdminService* const service_;
  const ConnectionUids* const uids_;
  EventStreams event_streams_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_ADMIN_CALLS_H_
