#ifndef OPTSTATE_SERVER_CONTROL_CONTROL_SOCKET_H_
#define OPTSTATE_SERVER_CONTROL_CONTROL_SOCKET_H_

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/shm/frame.h"
#include "proto/types/unique_fd.h"

namespace optstate::control {

// The socket on which an engine is found by its supervisor, and by the next
// one: JOB_DIR/engine.sock, SOCK_SEQPACKET, at most one fd a packet. Every
// socket here is non-blocking.

inline constexpr char kSocketName[] = "engine.sock";
// A Hello and what the supervisor adds to it; or the inodes of Ready.
inline constexpr size_t kPacketBytesMax = shm::kHelloBytesMax + 4096;

// For the supervisor to make and the engine to inherit, so that there is no
// time in which the engine is there and cannot be found. Replaces the socket of
// an engine that is dead: the caller has found that nobody answers.
absl::StatusOr<UniqueFd> Listen(const std::string& job_directory);

// Makes this process the one that SO_PEERCRED names to whoever connects from
// now on, instead of the one that called Listen().
absl::Status TakeOver(int listener);

// UNAVAILABLE: nobody listens there.
absl::StatusOr<UniqueFd> Connect(const std::string& job_directory);

// The next connection that waits; none: UNAVAILABLE. One of another user than
// this one or root is dropped (PERMISSION_DENIED).
absl::StatusOr<UniqueFd> Accept(int listener);

// Who listens at the other end of a connection from Connect(); 0 when the
// kernel does not say.
pid_t PeerPid(int connection);

struct Packet {
  std::string bytes;
  UniqueFd fd;       // -1: none
  pid_t sender = 0;  // the kernel's word; for connections from Connect() only
};

// Never blocks. `fd` -1: none. 0 or an errno: EAGAIN when the peer does not
// read just now, EPIPE or ECONNRESET when it is gone.
int Send(int connection, absl::string_view bytes, int fd);

// The next packet; nullopt: none just now. UNAVAILABLE: the peer has closed.
// INVALID_ARGUMENT: a packet that was cut off or had more than one fd; it was
// taken, and the next one can be.
absl::StatusOr<std::optional<Packet>> Receive(int connection);

}  // namespace optstate::control

#endif  // OPTSTATE_SERVER_CONTROL_CONTROL_SOCKET_H_
