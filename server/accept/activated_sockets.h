#ifndef OPTSTATE_SERVER_ACCEPT_ACTIVATED_SOCKETS_H_
#define OPTSTATE_SERVER_ACCEPT_ACTIVATED_SOCKETS_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "server/accept/listener.h"

namespace optstate::accept {

// Socket activation: the service manager opens listening sockets, and starts
// the daemon when somebody connects (sd_listen_fds(3)).

// A file descriptor that the service manager passes, with the name that its
// unit gives it (FileDescriptorName=).
struct ActivatedSocket {
  int fd = -1;
  std::string name;
};

// The names of sockets: that of `socket` in the configuration, and those of
// `listen`.
inline constexpr char kActivatedSocket[] = "socket";
inline constexpr char kActivatedListen[] = "listen";

// Returns what is passed to this process, closed when it executes another
// program, and removes the variables that say so: neither an engine nor the
// next build may take its own descriptors for these. Empty: the daemon opens
// its sockets itself. INVALID_ARGUMENT: the variables contradict themselves.
// Called while the process has one thread.
absl::StatusOr<std::vector<ActivatedSocket>> TakeActivatedSockets();

// Makes listeners of `sockets`, whose descriptors it owns from here on, by
// configured address. FAILED_PRECONDITION, naming the descriptor, what it is
// and what the configuration says, for one that is not a listening stream
// socket, is bound to another address, has other permissions than socket_mode
// (somebody may have connected by them), or comes twice.
absl::StatusOr<std::map<std::string, std::unique_ptr<Listener>>>
AdoptActivatedSockets(const v1::DaemonConfig& config,
                      const std::vector<ActivatedSocket>& sockets);

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_ACTIVATED_SOCKETS_H_
