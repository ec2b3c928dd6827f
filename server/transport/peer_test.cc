#include "server/transport/peer.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "gtest/gtest.h"

namespace optstate::transport {
namespace {

class PeerLinkTest : public testing::Test {
 protected:
  void SetUp() override {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ours_.reset(fds[0]);
    theirs_.reset(fds[1]);
  }

  UniqueFd ours_;
  UniqueFd theirs_;
};

TEST_F(PeerLinkTest, GoneWhenTheSocketIsClosed) {
  PeerLink link(ours_.get(), 0);
  EXPECT_FALSE(link.IsGone());
  ASSERT_EQ(::write(theirs_.get(), "x", 1), 1);
  EXPECT_FALSE(link.IsGone());  // data is a sign of life
  theirs_.reset();
  EXPECT_TRUE(link.IsGone());
}

TEST_F(PeerLinkTest, GoneWhenHalfClosed) {
  PeerLink link(ours_.get(), 0);
  ASSERT_EQ(::shutdown(theirs_.get(), SHUT_WR), 0);
  EXPECT_TRUE(link.IsGone());
}

TEST_F(PeerLinkTest, GoneWhenItsProcessEndsThoughTheSocketIsOpen) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    while (true) ::pause();
  }
  PeerLink link(ours_.get(), pid);
  EXPECT_FALSE(link.IsGone());
  ::kill(pid, SIGKILL);
  int status;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(link.IsGone());
  // The process was gone before the first look.
  EXPECT_TRUE(PeerLink(ours_.get(), pid).IsGone());
}

}  // namespace
}  // namespace optstate::transport
