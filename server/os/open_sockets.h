#ifndef OPTSTATE_SERVER_OS_OPEN_SOCKETS_H_
#define OPTSTATE_SERVER_OS_OPEN_SOCKETS_H_

#include <sys/types.h>

#include <set>

#include "absl/status/statusor.h"

namespace optstate::os {

// Inodes of the sockets that process `pid`, one of this user's, has open.
absl::StatusOr<std::set<ino_t>> OpenSockets(pid_t pid);

// Inode of an open socket.
absl::StatusOr<ino_t> SocketInode(int fd);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_OPEN_SOCKETS_H_
