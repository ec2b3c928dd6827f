#ifndef OPTSTATE_SERVER_ENGINE_CONTROL_SOCKET_H_
#define OPTSTATE_SERVER_ENGINE_CONTROL_SOCKET_H_

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/shm/frame.h"
#include "proto/types/unique_fd.h"

namespace optstate::engine {

// The socket on which an engine's supervisor, and the next one, find it:
// JOB_DIR/engine.sock, SOCK_SEQPACKET, at most one fd a packet. Every socket
// here is non-blocking.

inline constexpr char kSocketName[] = "engine.sock";
// Limit of a packet: a Hello and what the supervisor adds to it, or the inodes
// of Ready.
inline constexpr size_t kPacketBytesMax = shm::kHelloBytesMax + 4096;

// Makes the listening socket in the supervisor, for the engine to inherit, so
// that an engine that runs can always be found. Replaces the socket of an
// engine that is dead: the caller has found that no process answers.
absl::StatusOr<UniqueFd> ListenForSupervisor(const std::string& job_directory);

// Makes SO_PEERCRED name this process to peers that connect from now on,
// instead of the process that called ListenForSupervisor().
absl::Status TakeListenerOver(int listener);

// Connects to the job's engine. UNAVAILABLE: no process listens there.
absl::StatusOr<UniqueFd> ConnectToEngine(const std::string& job_directory);

// Accepts the next waiting connection. UNAVAILABLE: none waits. A connection of
// a user other than this one or root is dropped (PERMISSION_DENIED).
absl::StatusOr<UniqueFd> AcceptSupervisor(int listener);

// Pid of the process that listens at the other end of a connection from
// ConnectToEngine(); 0 when the kernel does not say.
pid_t PeerPid(int connection);

struct Packet {
  std::string bytes;
  UniqueFd fd;  // -1: none
  // The kernel's word; only for connections from ConnectToEngine().
  pid_t sender = 0;
};

// Sends one packet; never blocks. `fd` -1: none. Returns 0 or an errno: EAGAIN
// when the peer does not read just now, EPIPE or ECONNRESET when it is gone.
int SendPacket(int connection, absl::string_view bytes, int fd);

// Receives the next packet; nullopt: none just now. UNAVAILABLE: the peer has
// closed. INVALID_ARGUMENT: the packet was cut off or had more than one fd; it
// is dropped, and the next one can be received.
absl::StatusOr<std::optional<Packet>> ReceivePacket(int connection);

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_CONTROL_SOCKET_H_
