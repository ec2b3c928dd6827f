#include "server/os/open_sockets.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/types/unique_fd.h"

namespace optstate::os {
namespace {

TEST(OpenSocketsTest, OfAProcess) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  UniqueFd a(fds[0]);
  UniqueFd b(fds[1]);
  const ino_t inode = *SocketInode(a.get());
  EXPECT_TRUE(OpenSockets(::getpid())->contains(inode));
  a.reset();
  EXPECT_FALSE(OpenSockets(::getpid())->contains(inode));
  EXPECT_TRUE(OpenSockets(::getpid())->contains(*SocketInode(b.get())));
  EXPECT_FALSE(OpenSockets(0).ok());
  EXPECT_FALSE(SocketInode(-1).ok());
}

}  // namespace
}  // namespace optstate::os
