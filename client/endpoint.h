#ifndef OPTSTATE_CLIENT_ENDPOINT_H_
#define OPTSTATE_CLIENT_ENDPOINT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::client {

// Where a daemon is, and over which wire.
struct Endpoint {
  enum class Kind {
    kShm,       // unix:PATH: shared memory, over a unix socket
    kGrpcUnix,  // grpc:unix:PATH
    kGrpcTcp,   // grpc:HOST:PORT; HOST may be [IPv6]
    kEmbedded,  // embedded: a private daemon of this process
  };
  Kind kind = Kind::kEmbedded;
  std::string path;  // kShm, kGrpcUnix
  std::string host;  // kGrpcTcp, without brackets
  std::string port;  // kGrpcTcp

  std::string ToString() const;
};

// INVALID_ARGUMENT, naming the known forms, when it is none of them.
absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view text);

// Of a daemon that may have been killed and be started again.
enum class AwayDaemon {
  kIsNone,  // as if there were none
  kCounts,  // what is wanted from it can be had from no other
};

// The endpoint to use when the caller says `text`. When it is empty:
// $OPTSTATE_ENDPOINT, else the first of the node's daemon sockets that accepts
// (/run/optstate/optstated.sock, $XDG_RUNTIME_DIR/optstate/optstated.sock,
// /tmp/optstate-UID/optstated.sock if nobody else can write there), else, when
// `away` counts, the first of these that has a socket, else embedded.
absl::StatusOr<Endpoint> ResolveEndpoint(absl::string_view text,
                                         AwayDaemon away);

// What there is now at each place where ResolveEndpoint("") looks for the
// node's daemon, for people: "/run/optstate/optstated.sock (no such file),
// ...".
std::string DescribeNodeSockets();

// Whether a daemon has listened there, as the file system tells: it may come
// back. Over TCP nothing tells: false.
bool HadDaemon(const Endpoint& endpoint);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ENDPOINT_H_
