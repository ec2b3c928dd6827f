#include "server/supervisor/peer_credentials.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "proto/types/os_error.h"

namespace optstate::supervisor {

absl::StatusOr<PeerCredentials> GetPeerCredentials(int fd, bool is_unix) {
  if (!is_unix) return PeerCredentials{::geteuid(), 0, false};
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return OsError(errno, "getsockopt SO_PEERCRED");
  }
  return PeerCredentials{credentials.uid, credentials.pid, true};
}

}  // namespace optstate::supervisor
