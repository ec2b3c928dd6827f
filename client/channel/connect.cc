#include "client/channel/connect.h"

#include <utility>

#include "absl/status/status.h"
#include "client/channel/grpc/grpc_channel.h"
#include "client/channel/shm/shm_channel.h"
#include "client/endpoint/embedded.h"
#include "proto/types/status_macros.h"

namespace optstate::client {

absl::StatusOr<Endpoint> FindDaemon(const std::string& endpoint,
                                    AwayDaemon away,
                                    const std::string& daemon_path,
                                    absl::Duration start_timeout) {
  OPTSTATE_ASSIGN_OR_RETURN(Endpoint resolved, ResolveEndpoint(endpoint, away));
  if (resolved.kind != Endpoint::Kind::kEmbedded) return resolved;
  absl::StatusOr<std::string> socket =
      EmbeddedDaemonSocket(daemon_path, absl::Now() + start_timeout);
  if (!socket.ok()) return Annotate(socket.status(), "embedded daemon");
  resolved.kind = Endpoint::Kind::kShm;
  resolved.path = *std::move(socket);
  return resolved;
}

absl::StatusOr<std::unique_ptr<Channel>> MakeChannel(const Endpoint& endpoint,
                                                     ChannelSetup setup) {
  switch (endpoint.kind) {
    case Endpoint::Kind::kShm:
      return std::make_unique<ShmChannel>(endpoint, std::move(setup));
    case Endpoint::Kind::kGrpcUnix:
    case Endpoint::Kind::kGrpcTcp:
    case Endpoint::Kind::kGrpcTls:
      return MakeGrpcChannel(endpoint, std::move(setup));
    case Endpoint::Kind::kEmbedded:
      break;
  }
  return absl::InternalError("an embedded daemon is reached over its socket");
}

}  // namespace optstate::client
