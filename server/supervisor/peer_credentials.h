#ifndef OPTSTATE_SERVER_SUPERVISOR_PEER_CREDENTIALS_H_
#define OPTSTATE_SERVER_SUPERVISOR_PEER_CREDENTIALS_H_

#include <sys/types.h>

#include "absl/status/statusor.h"

namespace optstate::supervisor {

// Who is at the other end of a connection.
struct PeerCredentials {
  uid_t uid = 0;
  pid_t pid = 0;  // 0: unknown (TCP, or another pid namespace)
  bool is_unix = false;
};

// A unix socket's peer is whom the kernel says. TCP tells nobody's name, so a
// TCP peer acts as the daemon's own user: whoever configures `listen` with a
// TCP address trusts everybody who can reach it.
absl::StatusOr<PeerCredentials> GetPeerCredentials(int fd, bool is_unix);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_PEER_CREDENTIALS_H_
