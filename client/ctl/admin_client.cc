#include "client/ctl/admin_client.h"

#include <grpcpp/grpcpp.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/admin/admin_connection.h"
#include "client/admin/sleep_call.h"
#include "client/ctl/stream_watch.h"
#include "client/endpoint/endpoint.h"
#include "google/protobuf/util/time_util.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

constexpr absl::string_view kNameAnother =
    "or name another with --endpoint or $OPTSTATE_ENDPOINT (unix:PATH, "
    "grpc:HOST:PORT, grpcs:HOST:PORT, grpc:unix:PATH)";

// The part of a timeout that is left for the answer of a daemon that was asked
// to wait: at most this, and at most half of the timeout.
constexpr absl::Duration kAnswerTimeMax = absl::Seconds(1);

// How long one call that follows events lasts.
constexpr absl::Duration kFollowMax = absl::Minutes(1);

client::AdminWords Words() {
  return {.timeout = "--timeout",
          .name_another = std::string(kNameAnother),
          .when_silent = "; `optctl status` says how it is"};
}

bool IsReadable(int fd) {
  pollfd entry = {.fd = fd, .events = POLLIN, .revents = 0};
  return ::poll(&entry, 1, /*timeout=*/0) > 0;
}

class GrpcAdminClient : public AdminClient {
 public:
  explicit GrpcAdminClient(std::unique_ptr<client::AdminConnection> connection)
      : connection_(std::move(connection)) {}

  std::string address() const override {
    return connection_->endpoint().ToString();
  }

  bool is_local() const override {
    const client::Endpoint& endpoint = connection_->endpoint();
    return endpoint.kind != client::Endpoint::Kind::kGrpcTcp ||
           endpoint.host == "localhost" || endpoint.host == "::1" ||
           absl::StartsWith(endpoint.host, "127.");
  }

  absl::StatusOr<v1::ServerStatus> GetStatus() override {
    return Call(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest());
  }

  absl::StatusOr<v1::ListJobsReply> ListJobs() override {
    return Call(&v1::Admin::Stub::ListJobs, v1::ListJobsRequest());
  }

  absl::StatusOr<v1::Job> GetJob(const std::string& name,
                                 bool memory) override {
    v1::GetJobRequest request;
    request.set_name(name);
    request.set_memory(memory);
    return Call(&v1::Admin::Stub::GetJob, request);
  }

  absl::StatusOr<v1::ListSessionsReply> ListSessions(
      const std::string& job) override {
    v1::ListSessionsRequest request;
    request.set_job(job);
    return Call(&v1::Admin::Stub::ListSessions, request);
  }

  absl::StatusOr<v1::ListParametersReply> ListParameters(
      const std::string& job) override {
    v1::ListParametersReply all;
    v1::ListParametersRequest request;
    request.set_job(job);
    do {
      OPTSTATE_ASSIGN_OR_RETURN(
          v1::ListParametersReply page,
          Call(&v1::Admin::Stub::ListParameters, request));
      request.set_page_token(page.next_page_token());
      page.clear_next_page_token();
      all.MergeFrom(page);
    } while (!request.page_token().empty());
    return all;
  }

  absl::Status DeleteJob(
      const std::string& name, bool force, int interrupt,
      absl::FunctionRef<void(const v1::DeleteProgress&)> progress) override {
    OPTSTATE_RETURN_IF_ERROR(
        connection_->Await(absl::Now() + connection_->timeout()));
    grpc::ClientContext context;
    connection_->SayWhoCalls(&context);
    StreamWatch watch(&context, connection_->timeout(), interrupt);
    v1::DeleteJobRequest request;
    request.set_name(name);
    request.set_force(force);
    const auto reader =
        connection_->stub()->DeleteJobWatched(&context, request);
    v1::DeleteProgress message;
    bool has_begun = false;
    while (reader->Read(&message)) {
      watch.Touch();
      has_begun = true;
      progress(message);
    }
    const grpc::Status status = reader->Finish();
    if (status.ok()) return absl::OkStatus();
    if (watch.was_interrupted()) {
      // Before its first message the daemon may still refuse.
      return absl::CancelledError(absl::StrCat(
          "interrupted: the daemon ", has_begun ? "goes on" : "may go on",
          " to delete job ", name, "; `optctl events ", name,
          "` says when it is deleted"));
    }
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return Call(&v1::Admin::Stub::DeleteJob, request).status();
    }
    return watch.was_silent() ? connection_->Silent()
                              : connection_->Explain(status);
  }

  absl::StatusOr<v1::RecoverJobReply> RecoverJob(const std::string& name,
                                                 bool to_durable) override {
    v1::RecoverJobRequest request;
    request.set_name(name);
    request.set_to_durable(to_durable);
    return Call(&v1::Admin::Stub::RecoverJob, request);
  }

  absl::StatusOr<v1::SetJobReply> SetJob(
      const v1::SetJobRequest& request) override {
    return Call(&v1::Admin::Stub::SetJob, request);
  }

  absl::StatusOr<v1::DescribeTiersReply> DescribeTiers(
      const v1::DescribeTiersRequest& request) override {
    return Call(&v1::Admin::Stub::DescribeTiers, request);
  }

  absl::StatusOr<v1::DescribeTiersReply> MeasureTiers(
      const v1::DescribeTiersRequest& request,
      absl::Duration measuring) override {
    const absl::Time deadline = absl::Now() + connection_->timeout();
    OPTSTATE_RETURN_IF_ERROR(connection_->Await(deadline));
    return Ask(&v1::Admin::Stub::DescribeTiers, request, deadline + measuring);
  }

  absl::StatusOr<v1::DescribeDevicesReply> DescribeDevices() override {
    return Call(&v1::Admin::Stub::DescribeDevices,
                v1::DescribeDevicesRequest());
  }

  absl::StatusOr<v1::ListUsersReply> ListUsers(
      const v1::ListUsersRequest& request) override {
    return Call(&v1::Admin::Stub::ListUsers, request);
  }

  absl::Status VerifyJob(
      const std::string& name, int interrupt,
      absl::FunctionRef<void(const v1::VerifyJobProgress&)> progress) override {
    OPTSTATE_RETURN_IF_ERROR(
        connection_->Await(absl::Now() + connection_->timeout()));
    grpc::ClientContext context;
    connection_->SayWhoCalls(&context);
    StreamWatch watch(&context, connection_->timeout(), interrupt);
    v1::VerifyJobRequest request;
    request.set_name(name);
    const auto reader = connection_->stub()->VerifyJob(&context, request);
    v1::VerifyJobProgress message;
    while (reader->Read(&message)) {
      watch.Touch();
      progress(message);
    }
    const grpc::Status status = reader->Finish();
    if (status.ok()) return absl::OkStatus();
    if (watch.was_interrupted()) {
      return absl::CancelledError("interrupted: the verification was ended");
    }
    return watch.was_silent() ? connection_->Silent()
                              : connection_->Explain(status);
  }

  absl::Status TraceJob(
      const v1::TraceJobRequest& request, int interrupt,
      absl::FunctionRef<absl::Status(const v1::TraceChunk&)> pass) override {
    OPTSTATE_RETURN_IF_ERROR(
        connection_->Await(absl::Now() + connection_->timeout()));
    grpc::ClientContext context;
    connection_->SayWhoCalls(&context);
    StreamWatch watch(&context, connection_->timeout(), interrupt);
    const auto reader = connection_->stub()->TraceJob(&context, request);
    v1::TraceChunk chunk;
    absl::Status passed;
    while (passed.ok() && reader->Read(&chunk)) {
      passed = pass(chunk);
      watch.Touch();
    }
    if (!passed.ok()) context.TryCancel();
    const grpc::Status status = reader->Finish();
    OPTSTATE_RETURN_IF_ERROR(passed);
    if (status.ok()) return absl::OkStatus();
    if (watch.was_interrupted()) {
      return absl::CancelledError("interrupted: the trace was ended");
    }
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return Annotate(absl::UnimplementedError(
                          "the daemon is of an older build, which cannot "
                          "trace: `optctl upgrade` puts another in its place"),
                      address());
    }
    return watch.was_silent() ? connection_->Silent()
                              : connection_->Explain(status);
  }

  absl::Status SleepJob(const std::string& name, int interrupt,
                        OnSleepProgress progress) override {
    return client::CallSleepJob(
        connection_.get(), name, [interrupt] { return IsReadable(interrupt); },
        progress);
  }

  absl::Status WakeJob(const std::string& name, int interrupt,
                       OnSleepProgress progress) override {
    return client::CallWakeJob(
        connection_.get(), name, [interrupt] { return IsReadable(interrupt); },
        progress);
  }

  absl::StatusOr<v1::UpgradeReply> Upgrade(const std::string& binary) override {
    v1::UpgradeRequest request;
    request.set_binary(binary);
    return Call(&v1::Admin::Stub::Upgrade, request);
  }

  absl::StatusOr<v1::DrainReply> Drain(bool resume) override {
    const absl::Duration timeout = connection_->timeout();
    const absl::Time deadline = absl::Now() + timeout;
    OPTSTATE_RETURN_IF_ERROR(connection_->Await(deadline));
    // The daemon's own answer, at the end of its wait, names the unfinished
    // jobs.
    const absl::Duration wait =
        deadline - absl::Now() - std::min(kAnswerTimeMax, timeout / 2);
    v1::DrainRequest request;
    *request.mutable_timeout() =
        google::protobuf::util::TimeUtil::NanosecondsToDuration(
            absl::ToInt64Nanoseconds(std::max(wait, absl::ZeroDuration())));
    request.set_resume(resume);
    return Ask(&v1::Admin::Stub::Drain, request, deadline);
  }

  absl::Status WatchEvents(
      const v1::WatchEventsRequest& request, int interrupt,
      absl::FunctionRef<bool(const v1::Event&)> pass) override {
    const absl::Duration timeout = connection_->timeout();
    OPTSTATE_RETURN_IF_ERROR(connection_->Await(absl::Now() + timeout));
    grpc::ClientContext context;
    connection_->SayWhoCalls(&context);
    context.set_deadline(absl::ToChronoTime(
        absl::Now() + (request.follow() ? kFollowMax : timeout)));
    StreamWatch watch(&context, absl::InfiniteDuration(), interrupt);
    const auto reader = connection_->stub()->WatchEvents(&context, request);
    v1::Event event;
    bool goes_on = true;
    while (goes_on && reader->Read(&event)) goes_on = pass(event);
    if (!goes_on) context.TryCancel();
    const grpc::Status status = reader->Finish();
    if (!goes_on || watch.was_interrupted()) {
      return absl::CancelledError("interrupted");
    }
    if (status.ok()) return absl::OkStatus();
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return Annotate(absl::UnimplementedError(
                          "the daemon is of an older build, which remembers no "
                          "events: `optctl upgrade` puts another in its place"),
                      address());
    }
    // A daemon that ends, or makes way, may have no time to say so.
    if (status.error_code() == grpc::StatusCode::CANCELLED) {
      return Annotate(absl::UnavailableError("the daemon has ended the call"),
                      address());
    }
    return connection_->Explain(status);
  }

 private:
  template <typename Request, typename Reply>
  using Method = grpc::Status (v1::Admin::Stub::*)(grpc::ClientContext*,
                                                   const Request&, Reply*);

  // Connects and asks, within one timeout.
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Call(Method<Request, Reply> method,
                             const Request& request) {
    const absl::Time deadline = absl::Now() + connection_->timeout();
    OPTSTATE_RETURN_IF_ERROR(connection_->Await(deadline));
    return Ask(method, request, deadline);
  }

  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Ask(Method<Request, Reply> method,
                            const Request& request, absl::Time deadline) {
    grpc::ClientContext context;
    connection_->SayWhoCalls(&context);
    context.set_deadline(absl::ToChronoTime(deadline));
    Reply reply;
    const grpc::Status status =
        (connection_->stub()->*method)(&context, request, &reply);
    if (status.ok()) return reply;
    return connection_->Explain(status);
  }

  const std::unique_ptr<client::AdminConnection> connection_;
};

absl::Status NoneFound() {
  return absl::UnavailableError(
      absl::StrCat("no daemon was found on this node. Neither --endpoint nor "
                   "$OPTSTATE_ENDPOINT names one, so these were tried: ",
                   client::DescribeNodeSockets(), ". Start one (optstated), ",
                   kNameAnother));
}

bool IsNamed(const std::string& endpoint) {
  const char* const variable = std::getenv("OPTSTATE_ENDPOINT");
  return !endpoint.empty() || (variable != nullptr && *variable != '\0');
}

}  // namespace

absl::StatusOr<std::unique_ptr<AdminClient>> AdminClient::Make(
    const std::string& endpoint, absl::Duration timeout) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const client::Endpoint resolved,
      client::ResolveEndpoint(endpoint, client::AwayDaemon::kCounts));
  if (resolved.kind == client::Endpoint::Kind::kEmbedded &&
      !IsNamed(endpoint)) {
    return NoneFound();
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      std::unique_ptr<client::AdminConnection> connection,
      client::AdminConnection::Make(resolved, Words(), timeout));
  return std::make_unique<GrpcAdminClient>(std::move(connection));
}

}  // namespace optstate::ctl
