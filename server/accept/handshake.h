#ifndef OPTSTATE_SERVER_ACCEPT_HANDSHAKE_H_
#define OPTSTATE_SERVER_ACCEPT_HANDSHAKE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"
#include "server/accept/peer_credentials.h"
#include "server/observe/counters.h"
#include "server/os/event_loop.h"

namespace optstate::accept {

// Determines what each new connection wants: a session (an "OPST" frame with a
// Hello) or gRPC (HTTP/2's preface). Reads no byte beyond the Hello frame, so
// that the next reader of the connection finds all of the rest.
//
// A connection that sends neither, too slowly or too much is refused with a
// HelloReply that gives the reason, or, if it speaks HTTP/2, in gRPC. Strangers
// can hold at most kPendingMax connections here together, and one user, or one
// machine that connects over TCP, half of them. Root and the daemon's own user,
// over a unix socket, have as many places of their own.
//
// Threads: the loop's. The loop outlives the object. The callbacks may not
// destroy the object.
class Handshakes {
 public:
  static constexpr size_t kPendingMax = 512;

  struct Callbacks {
    std::function<void(UniqueFd, const PeerCredentials&, v1::Hello)> on_hello;
    std::function<void(UniqueFd, const PeerCredentials&)> on_grpc;
    // Takes a connection that speaks HTTP/2 when there is no room for it; may
    // be null.
    std::function<void(UniqueFd, const absl::Status&)> on_grpc_refused =
        nullptr;
  };

  Handshakes(os::EventLoop* loop, absl::Duration timeout, Callbacks callbacks);
  ~Handshakes();

  // Starts the handshake of a connection; `fd` is non-blocking. Unless
  // `verdict` is OK, the peer is refused with it as soon as it is known which
  // protocol it would understand that in.
  void Start(UniqueFd fd, const PeerCredentials& peer,
             const absl::Status& verdict = absl::OkStatus());

 private:
  enum class Progress { kWaiting, kDone };

  struct Pending {
    UniqueFd fd;
    PeerCredentials peer;
    absl::Status verdict;
    os::EventLoop::TimerId timer;
    // The header, then the Hello, as far as it has arrived.
    std::string received;
    observe::InQueue in_queue{observe::Queue::kHandshake};
  };

  absl::Status CheckRoom(const PeerCredentials& peer) const;
  void OnEvents(int fd);
  // Reads what has arrived. OK: done or waiting; an error says why the
  // connection is refused.
  absl::Status Advance(Pending* pending, Progress* progress);
  absl::Status ReadHello(Pending* pending, Progress* progress);
  // Ends the handshake of a connection that speaks HTTP/2.
  void FinishGrpc(Pending done);
  Pending Take(int fd);
  void Refuse(int fd, const absl::Status& status);

  os::EventLoop* const loop_;
  const absl::Duration timeout_;
  const Callbacks callbacks_;
  std::unordered_map<int, Pending> pending_;
  size_t pending_of_strangers_ = 0;
  std::map<std::string, size_t> pending_by_peer_;  // by quota_name()
};

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_HANDSHAKE_H_
