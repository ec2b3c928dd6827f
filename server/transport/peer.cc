#include "server/transport/peer.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace optstate::transport {

PeerLink::PeerLink(int socket, int64_t pid) : socket_(socket) {
  if (pid <= 0) return;
  process_.reset(
      static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
  // Without pidfds (a seccomp filter, an old kernel) the socket alone is used.
  was_gone_ = !process_.ok() && errno == ESRCH;
}

bool PeerLink::IsGone() const {
  if (was_gone_) return true;
  // poll() ignores negative fds.
  pollfd fds[2] = {{socket_, POLLRDHUP, 0}, {process_.get(), POLLIN, 0}};
  if (::poll(fds, 2, 0) <= 0) return false;
  return (fds[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0 ||
         (fds[1].revents & POLLIN) != 0;
}

}  // namespace optstate::transport
