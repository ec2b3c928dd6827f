#ifndef OPTSTATE_SERVER_ACCEPT_ACCEPTOR_H_
#define OPTSTATE_SERVER_ACCEPT_ACCEPTOR_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/types/unique_fd.h"
#include "server/accept/listener.h"
#include "server/accept/peer_credentials.h"
#include "server/access/unix_roles.h"
#include "server/os/event_loop.h"

namespace optstate::accept {

// Accepts on every listener and passes each connection on with its peer's
// credentials.
//
// When the process is out of file descriptors, a spare one is given up so that
// the peer can still be refused (RESOURCE_EXHAUSTED) and closed: a connection
// that stays in the backlog would wake the loop for ever. When even that fails
// (the machine is out of files or memory), accepting pauses for a moment.
//
// Threads: the loop's. The loop outlives the object.
class Acceptor {
 public:
  using Callback = std::function<void(UniqueFd, const PeerCredentials&)>;

  // `roles` are those of peers over unix sockets, see GetPeerCredentials().
  Acceptor(os::EventLoop* loop,
           std::vector<std::unique_ptr<Listener>> listeners,
           Callback on_connection, access::UnixRoles roles = {});
  ~Acceptor();

  absl::Status Start();
  // Closes and removes the sockets.
  void Stop();

  // Pauses accepting: connections wait in the sockets' backlogs.
  void Hold();
  void Release();

  const std::vector<std::unique_ptr<Listener>>& listeners() const {
    return listeners_;
  }

 private:
  void OnReadable(const Listener& listener);
  // Returns false when accepting should wait for the next wake-up.
  bool AcceptOne(const Listener& listener);
  bool OnAcceptError(const Listener& listener, int error_number);
  bool RefuseWithSpareFd(const Listener& listener);
  void LogTrouble(const Listener& listener, absl::string_view what);
  void Pause();
  void Resume();

  os::EventLoop* const loop_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  const Callback on_connection_;
  const access::UnixRoles roles_;
  UniqueFd spare_fd_;
  bool paused_ = false;
  bool held_ = false;
  os::EventLoop::TimerId resume_timer_;
};

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_ACCEPTOR_H_
