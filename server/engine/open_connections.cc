#include "server/engine/open_connections.h"

#include <unistd.h>

#include <algorithm>

#include "absl/status/statusor.h"
#include "server/os/open_sockets.h"

namespace optstate::engine {
namespace {

// The least number of new sockets before a look, which reads /proc.
constexpr size_t kLookMin = 64;
// The number of inodes that a Ready can carry.
constexpr size_t kMost = 8000;

}  // namespace

void OpenConnections::Note(int socket) {
  if (inodes_.size() >= std::max(look_at_size_, kLookMin)) ForgetClosed();
  const absl::StatusOr<ino_t> inode = os::SocketInode(socket);
  if (inode.ok() && inodes_.size() < kMost) inodes_.insert(*inode);
}

const std::set<ino_t>& OpenConnections::Find() {
  ForgetClosed();
  return inodes_;
}

void OpenConnections::ForgetClosed() {
  const absl::StatusOr<std::set<ino_t>> open = os::OpenSockets(::getpid());
  if (open.ok()) {
    std::erase_if(inodes_,
                  [&open](ino_t inode) { return !open->contains(inode); });
  }
  look_at_size_ = 2 * inodes_.size();
}

}  // namespace optstate::engine
