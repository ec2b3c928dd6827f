#ifndef OPTSTATE_SERVER_ACCEPT_PEER_CREDENTIALS_H_
#define OPTSTATE_SERVER_ACCEPT_PEER_CREDENTIALS_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"

namespace optstate::accept {

// The identity of a connection's peer.
struct PeerCredentials {
  uid_t uid = 0;
  pid_t pid = 0;  // 0: unknown (TCP, or another pid namespace)
  bool is_unix = false;
  // The peer's machine over TCP, as quotas count it: an IPv6 address without
  // its last 64 bits, which a machine can choose freely.
  std::string address = "";

  // Returns whether the peer is known to be root or the daemon's own user; over
  // TCP every peer acts as the daemon's user. Part of what strangers can use up
  // is reserved for operators.
  bool is_operator() const;
  // The name that quotas count: a user of this machine ("uid 1000"), or the
  // machine of a TCP peer ("address 10.0.0.7").
  std::string quota_name() const;
};

// Reads a peer's credentials: the kernel names a unix socket's peer. TCP names
// no user, so a TCP peer acts as the daemon's own user: configuring `listen`
// with a TCP address trusts everyone who can reach it.
absl::StatusOr<PeerCredentials> GetPeerCredentials(int fd, bool is_unix);

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_PEER_CREDENTIALS_H_
