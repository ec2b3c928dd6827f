#ifndef OPTSTATE_SERVER_SUPERVISOR_PEER_CREDENTIALS_H_
#define OPTSTATE_SERVER_SUPERVISOR_PEER_CREDENTIALS_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"

namespace optstate::supervisor {

// Who is at the other end of a connection.
struct PeerCredentials {
  uid_t uid = 0;
  pid_t pid = 0;  // 0: unknown (TCP, or another pid namespace)
  bool is_unix = false;
  // Of TCP: the machine, as quotas count it. An IPv6 address without its last
  // 64 bits, which one machine can choose as it likes.
  std::string address = "";

  // Root or the daemon's own user, and known to be so: over TCP anybody acts as
  // the daemon's user. What strangers can use up is kept in part for these.
  bool is_operator() const;
  // Whom quotas count: a user of this machine, or a machine that TCP comes
  // from, "uid 1000" or "address 10.0.0.7".
  std::string quota_name() const;
};

// A unix socket's peer is whom the kernel says. TCP tells nobody's name, so a
// TCP peer acts as the daemon's own user: whoever configures `listen` with a
// TCP address trusts everybody who can reach it.
absl::StatusOr<PeerCredentials> GetPeerCredentials(int fd, bool is_unix);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_PEER_CREDENTIALS_H_
