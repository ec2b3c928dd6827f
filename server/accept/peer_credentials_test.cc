#include "server/accept/peer_credentials.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "optstate/v1/config.pb.h"
#include "proto/types/unique_fd.h"
#include "server/access/unix_roles.h"

namespace optstate::accept {
namespace {

TEST(PeerCredentialsTest, TheKernelNamesTheUserOfAUnixSocket) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  const UniqueFd a(fds[0]);
  const UniqueFd b(fds[1]);
  const auto peer = GetPeerCredentials(a.get(), /*is_unix=*/true);
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->caller, access::UnixCaller(::geteuid()));
  EXPECT_EQ(peer->pid, ::getpid());
  EXPECT_TRUE(peer->is_unix());
  EXPECT_TRUE(peer->is_operator());
}

// A setting by which this process has no role: its own user is an operator all
// the same, and another would be nobody.
TEST(PeerCredentialsTest, TheRolesAreThoseOfTheGroups) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  const UniqueFd a(fds[0]);
  const UniqueFd b(fds[1]);
  v1::AccessSettings access;
  access.add_viewer_groups("4294967294");
  const auto roles = access::UnixRoles::Find(access);
  ASSERT_TRUE(roles.ok()) << roles.status();
  EXPECT_EQ(roles->OfPeer(a.get(), ::getegid()), access::Role::kNone);
  const auto peer = GetPeerCredentials(a.get(), /*is_unix=*/true, *roles);
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_TRUE(peer->is_operator());
}

// Nothing but TLS or the permission to do without makes it somebody.
TEST(PeerCredentialsTest, ATcpPeerIsNobody) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto peer = GetPeerCredentials(fd.get(), /*is_unix=*/false);
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->caller.role, access::Role::kNone);
  EXPECT_EQ(peer->caller.uid, access::Caller::kNobody);
  EXPECT_FALSE(peer->is_unix());
  EXPECT_FALSE(peer->is_operator());
}

TEST(PeerCredentialsTest, QuotasCountUsersIdentitiesOrMachines) {
  EXPECT_EQ(PeerCredentials{.caller = access::UnixCaller(7)}.quota_name(),
            "uid 7");
  EXPECT_EQ((PeerCredentials{.caller = access::InsecureTcpCaller(),
                             .address = "10.0.0.7"}
                 .quota_name()),
            "address 10.0.0.7");
  const access::Caller identity = {.uid = 7,
                                   .role = access::Role::kTrainer,
                                   .via = access::Via::kTls,
                                   .identity = "DNS:a"};
  EXPECT_EQ(
      (PeerCredentials{.caller = identity, .address = "10.0.0.7"}.quota_name()),
      "DNS:a (uid 7)");
  EXPECT_EQ((PeerCredentials{.caller = {.via = access::Via::kTls},
                             .address = "10.0.0.7"}
                 .quota_name()),
            "address 10.0.0.7");
}

}  // namespace
}  // namespace optstate::accept
