#include "client/ctl/admin_client.h"

#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/ctl/stream_watch.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/endpoint.h"
#include "google/protobuf/util/time_util.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "proto/types/grpc_status.h"
#include "proto/types/path_owners.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

constexpr absl::string_view kNameAnother =
    "or name another with --endpoint or $OPTSTATE_ENDPOINT (unix:PATH, "
    "grpc:HOST:PORT, grpcs:HOST:PORT, grpc:unix:PATH)";

constexpr absl::string_view kGoesOn =
    "the daemon goes on; `optctl describe job` says how far it is";

// The part of a timeout that is left for the answer of a daemon that was asked
// to wait: at most this, and at most half of the timeout.
constexpr absl::Duration kAnswerTimeMax = absl::Seconds(1);

// How long one call that follows events lasts.
constexpr absl::Duration kFollowMax = absl::Minutes(1);

class GrpcAdminClient : public AdminClient {
 public:
  GrpcAdminClient(client::Endpoint endpoint, const std::string& target,
                  absl::Duration timeout)
      : endpoint_(std::move(endpoint)), timeout_(timeout) {
    grpc::ChannelArguments arguments;
    // A page of 10,000 parameters is larger than gRPC's default of 4 MiB.
    arguments.SetMaxReceiveMessageSize(-1);
    // A proxy of the environment is for remote hosts, not for a daemon.
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    if (uses_tls()) return;
    channel_ = grpc::CreateCustomChannel(
        target, grpc::InsecureChannelCredentials(), arguments);
    stub_ = v1::Admin::NewStub(channel_);
  }

  std::string address() const override { return endpoint_.ToString(); }

  bool is_local() const override {
    return endpoint_.kind != client::Endpoint::Kind::kGrpcTcp ||
           endpoint_.host == "localhost" || endpoint_.host == "::1" ||
           absl::StartsWith(endpoint_.host, "127.");
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

  absl::StatusOr<v1::DeleteJobReply> DeleteJob(const std::string& name,
                                               bool force) override {
    v1::DeleteJobRequest request;
    request.set_name(name);
    request.set_force(force);
    return Call(&v1::Admin::Stub::DeleteJob, request);
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

  absl::StatusOr<v1::DescribeDevicesReply> DescribeDevices() override {
    return Call(&v1::Admin::Stub::DescribeDevices,
                v1::DescribeDevicesRequest());
  }

  absl::Status VerifyJob(
      const std::string& name, int interrupt,
      absl::FunctionRef<void(const v1::VerifyJobProgress&)> progress) override {
    OPTSTATE_RETURN_IF_ERROR(AwaitConnection(absl::Now() + timeout_));
    grpc::ClientContext context;
    SayWhoCalls(&context);
    StreamWatch watch(&context, timeout_, interrupt);
    v1::VerifyJobRequest request;
    request.set_name(name);
    return Follow<v1::VerifyJobProgress>(
        stub_->VerifyJob(&context, request).get(), &watch,
        "the verification was ended", progress);
  }

  absl::Status SleepJob(const std::string& name, int interrupt,
                        OnSleepProgress progress) override {
    OPTSTATE_RETURN_IF_ERROR(AwaitConnection(absl::Now() + timeout_));
    grpc::ClientContext context;
    SayWhoCalls(&context);
    StreamWatch watch(&context, timeout_, interrupt);
    v1::SleepJobRequest request;
    request.set_name(name);
    return Follow<v1::SleepProgress>(stub_->SleepJob(&context, request).get(),
                                     &watch, kGoesOn, progress);
  }

  absl::Status WakeJob(const std::string& name, int interrupt,
                       OnSleepProgress progress) override {
    OPTSTATE_RETURN_IF_ERROR(AwaitConnection(absl::Now() + timeout_));
    grpc::ClientContext context;
    SayWhoCalls(&context);
    StreamWatch watch(&context, timeout_, interrupt);
    v1::WakeJobRequest request;
    request.set_name(name);
    return Follow<v1::SleepProgress>(stub_->WakeJob(&context, request).get(),
                                     &watch, kGoesOn, progress);
  }

  absl::StatusOr<v1::UpgradeReply> Upgrade(const std::string& binary) override {
    v1::UpgradeRequest request;
    request.set_binary(binary);
    return Call(&v1::Admin::Stub::Upgrade, request);
  }

  absl::StatusOr<v1::DrainReply> Drain(bool resume) override {
    const absl::Time deadline = absl::Now() + timeout_;
    OPTSTATE_RETURN_IF_ERROR(AwaitConnection(deadline));
    // The daemon's own answer, at the end of its wait, names the unfinished
    // jobs.
    const absl::Duration wait =
        deadline - absl::Now() - std::min(kAnswerTimeMax, timeout_ / 2);
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
    OPTSTATE_RETURN_IF_ERROR(AwaitConnection(absl::Now() + timeout_));
    grpc::ClientContext context;
    SayWhoCalls(&context);
    context.set_deadline(absl::ToChronoTime(
        absl::Now() + (request.follow() ? kFollowMax : timeout_)));
    StreamWatch watch(&context, absl::InfiniteDuration(), interrupt);
    const auto reader = stub_->WatchEvents(&context, request);
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
      return Annotate(absl::FailedPreconditionError(
                          "the daemon is of an older build, which remembers no "
                          "events: `optctl upgrade` puts another in its place"),
                      endpoint_.ToString());
    }
    // A daemon that ends, or makes way, may have no time to say so.
    if (status.error_code() == grpc::StatusCode::CANCELLED) {
      return Annotate(absl::UnavailableError("the daemon has ended the call"),
                      endpoint_.ToString());
    }
    return Annotate(Explain(status), endpoint_.ToString());
  }

 private:
  template <typename Request, typename Reply>
  using Method = grpc::Status (v1::Admin::Stub::*)(grpc::ClientContext*,
                                                   const Request&, Reply*);

  // Reads a stream to its end. `interrupted`: what an interrupt has done.
  template <typename Message>
  absl::Status Follow(grpc::ClientReader<Message>* reader, StreamWatch* watch,
                      absl::string_view interrupted,
                      absl::FunctionRef<void(const Message&)> progress) {
    Message message;
    while (reader->Read(&message)) {
      watch->Touch();
      progress(message);
    }
    const grpc::Status status = reader->Finish();
    if (status.ok()) return absl::OkStatus();
    if (watch->was_interrupted()) {
      return absl::CancelledError(absl::StrCat("interrupted: ", interrupted));
    }
    return Annotate(watch->was_silent() ? Silent() : Explain(status),
                    endpoint_.ToString());
  }

  // Connects and asks, within one timeout.
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Call(Method<Request, Reply> method,
                             const Request& request) {
    const absl::Time deadline = absl::Now() + timeout_;
    OPTSTATE_RETURN_IF_ERROR(AwaitConnection(deadline));
    return Ask(method, request, deadline);
  }

  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Ask(Method<Request, Reply> method,
                            const Request& request, absl::Time deadline) {
    grpc::ClientContext context;
    SayWhoCalls(&context);
    context.set_deadline(absl::ToChronoTime(deadline));
    Reply reply;
    const grpc::Status status =
        (stub_.get()->*method)(&context, request, &reply);
    if (status.ok()) return reply;
    return Annotate(Explain(status), endpoint_.ToString());
  }

  void SayWhoCalls(grpc::ClientContext* context) const {
    const std::string token = client::TokenFor(endpoint_);
    if (token.empty()) return;
    context->AddMetadata("authorization", absl::StrCat("Bearer ", token));
  }

  bool uses_tls() const {
    return endpoint_.kind == client::Endpoint::Kind::kGrpcTls;
  }

  // Makes a connection for one call: a channel of a given connection does not
  // come back when that is lost.
  absl::Status ConnectWithTls(absl::Time deadline) {
    absl::StatusOr<UniqueFd> socket = client::Dial(endpoint_, deadline);
    if (!socket.ok()) return Annotate(socket.status(), endpoint_.ToString());
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    channel_ = grpc::CreateCustomInsecureChannelFromFd(
        endpoint_.host, socket->release(), arguments);
    stub_ = v1::Admin::NewStub(channel_);
    return absl::OkStatus();
  }

  // Waits until a gRPC server answers: the kernel also connects to a stopped
  // process, and to any other program that listens. Errors name the endpoint.
  absl::Status AwaitConnection(absl::Time deadline) {
    if (uses_tls()) return ConnectWithTls(deadline);
    grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/true);
    while (state != GRPC_CHANNEL_READY) {
      if (state == GRPC_CHANNEL_TRANSIENT_FAILURE) {
        return Annotate(UnreachableError(deadline), endpoint_.ToString());
      }
      if (!channel_->WaitForStateChange(state, absl::ToChronoTime(deadline))) {
        return absl::DeadlineExceededError(absl::StrCat(
            endpoint_.ToString(), ": no answer within ",
            absl::FormatDuration(timeout_),
            " (--timeout): nobody spoke gRPC there. The daemon is stopped or "
            "has too much to do, the way to it is cut, or something else "
            "listens there"));
      }
      state = channel_->GetState(/*try_to_connect=*/true);
    }
    return absl::OkStatus();
  }

  // Makes the error, with the system's own message about a connection.
  absl::Status UnreachableError(absl::Time deadline) const {
    absl::Status dialled =
        client::Dial(endpoint_,
                     std::min(deadline, absl::Now() + absl::Seconds(1)))
            .status();
    if (absl::IsPermissionDenied(dialled)) return dialled;
    if (dialled.ok()) {
      return absl::UnavailableError(
          "whoever accepts there closed the connection before it spoke gRPC: "
          "it "
          "refuses connections just now, or is another program");
    }
    const std::string place =
        endpoint_.path.empty()
            ? absl::StrCat("--listen ", endpoint_.host, ":", endpoint_.port)
            : absl::StrCat("--socket ", endpoint_.path);
    return absl::UnavailableError(
        absl::StrCat("no daemon answers there: ", dialled.message(),
                     ". Start one (optstated ", place, "), ", kNameAnother));
  }

  absl::Status Explain(const grpc::Status& status) const {
    absl::Status from_grpc = FromGrpc(status);
    // This text is gRPC's alone, without any of the daemon's.
    if (from_grpc.message() != "Deadline Exceeded") return from_grpc;
    return Silent();
  }

  absl::Status Silent() const {
    return absl::DeadlineExceededError(
        absl::StrCat("the daemon is there and gave no answer within ",
                     absl::FormatDuration(timeout_),
                     " (--timeout): it is stopped or has too much to do. "
                     "Whether it does what was asked "
                     "is not known; `optctl status` says how it is"));
  }

  const client::Endpoint endpoint_;
  const absl::Duration timeout_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Admin::Stub> stub_;
};

// Returns gRPC's address of the daemon, whose one unix socket serves both
// wires.
absl::StatusOr<std::string> GrpcTarget(const client::Endpoint& endpoint) {
  using Kind = client::Endpoint::Kind;
  switch (endpoint.kind) {
    case Kind::kShm:
    case Kind::kGrpcUnix:
      return absl::StrCat("unix:", endpoint.path);
    case Kind::kGrpcTcp: {
      const bool ipv6 = absl::StrContains(endpoint.host, ':');
      return absl::StrCat("dns:///", ipv6 ? "[" : "", endpoint.host,
                          ipv6 ? "]:" : ":", endpoint.port);
    }
    case Kind::kGrpcTls:  // each call makes its connection
      return std::string();
    case Kind::kEmbedded:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a private daemon (embedded) is its trainer's alone: name a node's, ",
      kNameAnother));
}

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
  OPTSTATE_ASSIGN_OR_RETURN(const std::string target, GrpcTarget(resolved));
  if (!resolved.path.empty()) {
    OPTSTATE_RETURN_IF_ERROR(Annotate(
        CheckPathOwners(std::filesystem::absolute(resolved.path).string(),
                        PathOwners::kTrusted),
        resolved.ToString()));
  }
  return std::make_unique<GrpcAdminClient>(resolved, target, timeout);
}

}  // namespace optstate::ctl
