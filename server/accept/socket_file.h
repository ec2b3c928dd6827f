#ifndef OPTSTATE_SERVER_ACCEPT_SOCKET_FILE_H_
#define OPTSTATE_SERVER_ACCEPT_SOCKET_FILE_H_

#include <sys/un.h>

#include <string>

#include "absl/status/status.h"

namespace optstate::accept {

// The file of a unix socket, for those who listen there. `path` has passed
// config::CheckUnixSocketPath.

sockaddr_un UnixSocketAddress(const std::string& path);

// Creates the missing directories of a socket's path. FAILED_PRECONDITION when
// a stranger could put a socket of his own there.
absl::Status PrepareSocketFolder(const std::string& path);

// Removes a socket file on which no process listens; OK also when there is
// none. FAILED_PRECONDITION when a process listens there, or it is no socket.
absl::Status RemoveDeadSocket(const std::string& path);

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_SOCKET_FILE_H_
