#include "server/supervisor/session_ledger.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/types/unique_fd.h"

namespace optstate::supervisor {
namespace {

TEST(SessionLedgerTest, Counts) {
  SessionLedger ledger;
  ledger.Add("a", 1);
  ledger.Add("a", 2);
  ledger.Add("b", 3);
  ledger.Add("b", 3);
  EXPECT_EQ(ledger.count(), 3u);
  ledger.Retain("a", {2, 3, 99});
  EXPECT_EQ(ledger.count(), 2u);
  ledger.Forget("b");
  ledger.Forget("unknown");
  EXPECT_EQ(ledger.count(), 1u);
}

TEST(SessionLedgerTest, OpenSocketsOfAProcess) {
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
}  // namespace optstate::supervisor
