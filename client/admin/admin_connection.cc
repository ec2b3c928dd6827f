#include "client/admin/admin_connection.h"

#include <grpcpp/create_channel_posix.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/interrupt.h"
#include "proto/types/grpc_status.h"
#include "proto/types/path_owners.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {
namespace {

bool UsesTls(const Endpoint& endpoint) {
  return endpoint.kind == Endpoint::Kind::kGrpcTls;
}

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  // A page of 10,000 parameters is larger than gRPC's default of 4 MiB.
  arguments.SetMaxReceiveMessageSize(-1);
  // A proxy of the environment is for remote hosts, not for a daemon.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A daemon that is started again is found soon.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return arguments;
}

// Returns gRPC's address of a daemon that is reached without TLS.
std::string GrpcTarget(const Endpoint& endpoint) {
  if (endpoint.kind != Endpoint::Kind::kGrpcTcp) {
    return absl::StrCat("unix:", endpoint.path);
  }
  const bool ipv6 = absl::StrContains(endpoint.host, ':');
  return absl::StrCat("dns:///", ipv6 ? "[" : "", endpoint.host,
                      ipv6 ? "]:" : ":", endpoint.port);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AdminConnection>> AdminConnection::Make(
    const Endpoint& endpoint, AdminWords words, absl::Duration timeout) {
  if (endpoint.kind == Endpoint::Kind::kEmbedded) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a private daemon (embedded) is its trainer's alone: name a node's, ",
        words.name_another));
  }
  if (!endpoint.path.empty()) {
    OPTSTATE_RETURN_IF_ERROR(Annotate(
        CheckPathOwners(std::filesystem::absolute(endpoint.path).string(),
                        PathOwners::kTrusted),
        endpoint.ToString()));
  }
  return std::unique_ptr<AdminConnection>(
      new AdminConnection(endpoint, std::move(words), timeout));
}

AdminConnection::AdminConnection(Endpoint endpoint, AdminWords words,
                                 absl::Duration timeout)
    : endpoint_(std::move(endpoint)),
      words_(std::move(words)),
      timeout_(timeout) {
  if (UsesTls(endpoint_)) return;  // each call makes its connection
  channel_ = grpc::CreateCustomChannel(
      GrpcTarget(endpoint_), grpc::InsecureChannelCredentials(), Arguments());
  stub_ = v1::Admin::NewStub(channel_);
}

// The kernel also connects to a stopped process, and to any other program that
// listens: only gRPC's greeting tells.
absl::Status AdminConnection::Await(absl::Time deadline,
                                    const InterruptCheck& interrupted) {
  if (UsesTls(endpoint_)) return ConnectWithTls(deadline, interrupted);
  grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/true);
  while (state != GRPC_CHANNEL_READY) {
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      return Annotate(UnreachableError(deadline), endpoint_.ToString());
    }
    const absl::Time until =
        interrupted ? std::min(deadline, absl::Now() + kInterruptSlice)
                    : deadline;
    if (!channel_->WaitForStateChange(state, absl::ToChronoTime(until))) {
      if (until == deadline) return NobodySpoke();
      OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
    }
    state = channel_->GetState(/*try_to_connect=*/true);
  }
  return absl::OkStatus();
}

// A channel of a given connection does not come back when that is lost.
absl::Status AdminConnection::ConnectWithTls(
    absl::Time deadline, const InterruptCheck& interrupted) {
  absl::StatusOr<UniqueFd> socket = Dial(endpoint_, deadline, interrupted);
  if (!socket.ok()) return Annotate(socket.status(), endpoint_.ToString());
  channel_ = grpc::CreateCustomInsecureChannelFromFd(
      endpoint_.host, socket->release(), Arguments());
  stub_ = v1::Admin::NewStub(channel_);
  return absl::OkStatus();
}

void AdminConnection::SayWhoCalls(grpc::ClientContext* context) const {
  const std::string token = TokenFor(endpoint_);
  if (token.empty()) return;
  context->AddMetadata("authorization", absl::StrCat("Bearer ", token));
}

absl::Status AdminConnection::Explain(const grpc::Status& status) const {
  const absl::Status from_grpc = FromGrpc(status);
  // This text is gRPC's alone, without any of the daemon's.
  if (from_grpc.message() == "Deadline Exceeded") return Silent();
  // The daemon answers so when it does not know the call, and then alone.
  if (absl::IsUnimplemented(from_grpc)) return OlderDaemon();
  return Annotate(from_grpc, endpoint_.ToString());
}

absl::Status AdminConnection::OlderDaemon() const {
  return absl::UnimplementedError(absl::StrCat(
      endpoint_.ToString(),
      ": the daemon is of an older build, which does not know this: `optctl "
      "upgrade` puts a newer one in its place"));
}

absl::Status AdminConnection::Silent() const {
  return absl::DeadlineExceededError(absl::StrCat(
      endpoint_.ToString(), ": the daemon is there and gave no answer within ",
      absl::FormatDuration(timeout_), " (", words_.timeout,
      "): it is stopped or has too much to do. Whether it does what was asked "
      "is not known",
      words_.when_silent));
}

absl::Status AdminConnection::NobodySpoke() const {
  return absl::DeadlineExceededError(absl::StrCat(
      endpoint_.ToString(), ": no answer within ",
      absl::FormatDuration(timeout_), " (", words_.timeout,
      "): nobody spoke gRPC there. The daemon is stopped or has too much to "
      "do, the way to it is cut, or something else listens there"));
}

// Makes the error, with the system's own message about a connection.
absl::Status AdminConnection::UnreachableError(absl::Time deadline) const {
  absl::Status dialled =
      Dial(endpoint_, std::min(deadline, absl::Now() + absl::Seconds(1)))
          .status();
  if (absl::IsPermissionDenied(dialled)) return dialled;
  if (dialled.ok()) {
    return absl::UnavailableError(
        "whoever accepts there closed the connection before it spoke gRPC: it "
        "refuses connections just now, or is another program");
  }
  const std::string place =
      endpoint_.path.empty()
          ? absl::StrCat("--listen ", endpoint_.host, ":", endpoint_.port)
          : absl::StrCat("--socket ", endpoint_.path);
  return absl::UnavailableError(absl::StrCat(
      "no daemon answers there: ", dialled.message(), ". Start one (optstated ",
      place, "), ", words_.name_another));
}

}  // namespace optstate::client
