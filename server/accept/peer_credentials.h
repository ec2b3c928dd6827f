#ifndef OPTSTATE_SERVER_ACCEPT_PEER_CREDENTIALS_H_
#define OPTSTATE_SERVER_ACCEPT_PEER_CREDENTIALS_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"
#include "server/access/caller.h"
#include "server/access/unix_roles.h"

namespace optstate::accept {

// The identity of a connection's peer.
struct PeerCredentials {
  access::Caller caller;
  pid_t pid = 0;  // 0: unknown (TCP, or another pid namespace)
  // The peer's machine over TCP, as quotas count it: an IPv6 address without
  // its last 64 bits, which a machine can choose freely.
  std::string address = "";

  bool is_unix() const { return caller.via == access::Via::kUnix; }
  // Part of what strangers can use up is reserved for operators.
  bool is_operator() const { return caller.is_operator(); }
  // The name that quotas count: a user of this machine ("uid 1000"), a TLS
  // client by its identity, or else the machine of a TCP peer ("address
  // 10.0.0.7").
  std::string quota_name() const;
};

// Reads a peer's credentials: the kernel names a unix socket's peer and its
// groups, which have the roles of `roles`. A TCP peer is nobody: what comes
// next says who it is, be it TLS or the permission to do without.
absl::StatusOr<PeerCredentials> GetPeerCredentials(
    int fd, bool is_unix, const access::UnixRoles& roles = {});

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_PEER_CREDENTIALS_H_
