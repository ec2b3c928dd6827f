#ifndef OPTSTATE_CLIENT_ENDPOINT_ENDPOINT_H_
#define OPTSTATE_CLIENT_ENDPOINT_ENDPOINT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::client {

// The location of a daemon and the wire to use.
struct Endpoint {
  enum class Kind {
    kShm,       // unix:PATH: shared memory, over a unix socket
    kGrpcUnix,  // grpc:unix:PATH
    kGrpcTcp,   // grpc:HOST:PORT; HOST may be [IPv6]
    kGrpcTls,   // grpcs:HOST:PORT: the same over TLS, see tls_tunnel.h
    kEmbedded,  // embedded: a private daemon of this process
  };
  Kind kind = Kind::kEmbedded;
  std::string path;  // kShm, kGrpcUnix
  std::string host;  // kGrpcTcp, kGrpcTls, without brackets
  std::string port;  // kGrpcTcp, kGrpcTls

  std::string ToString() const;
};

// Parses an endpoint. INVALID_ARGUMENT names the known forms.
absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view text);

// How to treat a daemon that may have been killed and may be started again.
enum class AwayDaemon {
  kIsNone,  // as if there were no daemon
  kCounts,  // only this daemon can provide what the caller wants
};

// Returns the endpoint to use when the caller names `text`. An empty text means
// $OPTSTATE_ENDPOINT, else the first of the node's daemon sockets that accepts
// (/run/optstate/optstated.sock, $XDG_RUNTIME_DIR/optstate/optstated.sock,
// /tmp/optstate-UID/optstated.sock if only this user can write there), else,
// with AwayDaemon::kCounts, the first of these paths that has a socket, else
// embedded.
absl::StatusOr<Endpoint> ResolveEndpoint(absl::string_view text,
                                         AwayDaemon away);

// Returns the token ($OPTSTATE_TOKEN) that says who this client is, where the
// daemon asks for no certificate; "": there is none, or the way to the daemon
// is not encrypted.
std::string TokenFor(const Endpoint& endpoint);

// Describes, for people, what exists at each place where ResolveEndpoint("")
// looks for the node's daemon: "/run/optstate/optstated.sock (no such file),
// ...".
std::string DescribeNodeSockets();

// Returns whether a daemon has listened there, according to the file system, so
// that it may come back. Over TCP this cannot be known: false.
bool HadDaemon(const Endpoint& endpoint);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ENDPOINT_ENDPOINT_H_
