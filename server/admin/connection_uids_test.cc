#include "server/admin/connection_uids.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace optstate::admin {
namespace {

UniqueFd Connection() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

class ConnectionUidsTest : public testing::Test {
 protected:
  int Move(uid_t uid) { return Move(access::UnixCaller(uid)); }
  int Move(const Caller& caller) {
    const auto fd = uids_.Move(Connection(), caller);
    EXPECT_TRUE(fd.ok()) << fd.status();
    return fd.value_or(-1);
  }
  uid_t Find(int fd) {
    return uids_.Find(absl::StrCat("fd:", fd))
        .value_or(Caller{.uid = ~uid_t{0}})
        .uid;
  }

  static constexpr size_t kConnectionsMax = 64;

  ConnectionUids uids_{kConnectionsMax};
};

TEST_F(ConnectionUidsTest, FindsTheUser) {
  const UniqueFd a(Move(1));
  const UniqueFd b(Move(2));
  EXPECT_EQ(Find(a.get()), 1u);
  EXPECT_EQ(Find(b.get()), 2u);
  for (const char* unknown : {"", "fd:", "fd:3", "fd:99999", "fd:-1", "unix:/x",
                              "ipv4:127.0.0.1:80"}) {
    EXPECT_FALSE(uids_.Find(unknown).ok()) << unknown;
  }
}

TEST_F(ConnectionUidsTest, AProcessThatMayOpenFewFilesHasRoomToo) {
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit tight = {256, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  ConnectionUids uids(kConnectionsMax);
  const auto moved = uids.Move(Connection(), access::UnixCaller(1));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_TRUE(moved.ok()) << moved.status();
  const UniqueFd fd(*moved);
  EXPECT_EQ(uids.Find(absl::StrCat("fd:", *moved))->uid, 1u);
}

// A call of user 1 may still run when its connection is closed and user 2's
// arrives.
TEST_F(ConnectionUidsTest, AClosedConnectionsNumberNeverGoesToAnotherUser) {
  std::set<int> of_user_1;
  for (int i = 0; i < 3; ++i) of_user_1.insert(Move(1));
  for (const int fd : of_user_1) ::close(fd);
  for (int i = 0; i < 5; ++i) {
    const UniqueFd other(Move(2));
    EXPECT_FALSE(of_user_1.contains(other.get()));
  }
  for (const int fd : of_user_1) EXPECT_EQ(Find(fd), 1u);
  // Nor does it go to the same user with less or more to say.
  const Caller remotes[] = {
      {.uid = 1, .role = access::Role::kTrainer, .via = access::Via::kTls},
      {.uid = 1, .role = access::Role::kOperator, .via = access::Via::kUnix},
      {.uid = 1,
       .role = access::Role::kTrainer,
       .via = access::Via::kUnix,
       .identity = "DNS:a"}};
  for (const Caller& caller : remotes) {
    const UniqueFd remote(Move(caller));
    EXPECT_FALSE(of_user_1.contains(remote.get()));
    EXPECT_EQ(*uids_.Find(absl::StrCat("fd:", remote.get())), caller);
  }
  const UniqueFd again(Move(1));
  EXPECT_TRUE(of_user_1.contains(again.get()));
}

TEST_F(ConnectionUidsTest, LimitsOpenConnectionsOfOneUser) {
  std::vector<UniqueFd> fds;
  for (size_t i = 0; i < kConnectionsMax; ++i) fds.emplace_back(Move(1));
  const absl::Status refused = uids_.CheckRoom(access::UnixCaller(1));
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_TRUE(
      absl::StrContains(refused.message(), "limits.user_grpc_connections_max"));
  EXPECT_TRUE(uids_.CheckRoom(access::UnixCaller(2)).ok());
  // The connection is closed by its holder, and its number taken by another
  // file.
  const int number = fds.back().get();
  fds.pop_back();
  ASSERT_EQ(::dup2(STDERR_FILENO, number), number);
  fds.emplace_back(number);
  EXPECT_TRUE(uids_.CheckRoom(access::UnixCaller(1)).ok());
}

// One user of a container has thousands of uids.
TEST_F(ConnectionUidsTest, StrangersTogetherLeaveRoomForOperators) {
  std::vector<UniqueFd> fds;
  for (size_t i = 0; i < ConnectionUids::kStrangersConnectionsMax; ++i) {
    const Caller caller = access::UnixCaller(100000 + static_cast<uid_t>(i));
    ASSERT_TRUE(uids_.CheckRoom(caller).ok());
    fds.emplace_back(Move(caller.uid));
  }
  EXPECT_TRUE(
      absl::IsResourceExhausted(uids_.CheckRoom(access::UnixCaller(7))));
  EXPECT_TRUE(
      absl::IsResourceExhausted(uids_.CheckRoom(access::InsecureTcpCaller())));
  EXPECT_TRUE(uids_.CheckRoom(access::UnixCaller(0)).ok());
  EXPECT_TRUE(uids_.CheckRoom(access::UnixCaller(::geteuid())).ok());
}

}  // namespace
}  // namespace optstate::admin
