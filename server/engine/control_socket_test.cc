#include "server/engine/control_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace optstate::engine {
namespace {

class ControlSocketTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = absl::StrCat(testing::TempDir(), "/control-XXXXXX");
    ASSERT_NE(::mkdtemp(directory_.data()), nullptr);
  }

  std::string directory_;
};

TEST_F(ControlSocketTest, NobodyListens) {
  EXPECT_TRUE(absl::IsUnavailable(ConnectToEngine(directory_).status()));
  // The socket is left behind by a process that has ended.
  { ASSERT_TRUE(ListenForSupervisor(directory_).ok()); }
  EXPECT_TRUE(absl::IsUnavailable(ConnectToEngine(directory_).status()));
  EXPECT_TRUE(
      absl::IsNotFound(ConnectToEngine(directory_ + "/absent").status()));
}

TEST_F(ControlSocketTest, PathsMayBeLongerThanAnAddress) {
  for (int i = 0; i < 5; ++i) {
    directory_ += "/" + std::string(100, 'd');
    ASSERT_EQ(::mkdir(directory_.c_str(), 0700), 0);
  }
  const auto listener = ListenForSupervisor(directory_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(ConnectToEngine(directory_).ok());
}

TEST_F(ControlSocketTest, PacketsAndFdsArriveWhole) {
  const auto listener = ListenForSupervisor(directory_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(absl::IsUnavailable(AcceptSupervisor(listener->get()).status()));
  auto near = ConnectToEngine(directory_);
  ASSERT_TRUE(near.ok()) << near.status();
  auto far = AcceptSupervisor(listener->get());
  ASSERT_TRUE(far.ok()) << far.status();

  EXPECT_FALSE(ReceivePacket(near->get())->has_value());
  const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(SendPacket(far->get(), "one", -1), 0);
  ASSERT_EQ(
      SendPacket(far->get(), std::string(kPacketBytesMax, 'x'), file.get()), 0);
  auto packet = ReceivePacket(near->get());
  ASSERT_TRUE(packet.ok() && packet->has_value());
  EXPECT_EQ((*packet)->bytes, "one");
  EXPECT_FALSE((*packet)->fd.ok());
  EXPECT_EQ((*packet)->sender, ::getpid());
  packet = ReceivePacket(near->get());
  ASSERT_TRUE(packet.ok() && packet->has_value());
  EXPECT_EQ((*packet)->bytes.size(), kPacketBytesMax);
  EXPECT_TRUE((*packet)->fd.ok());

  // A packet that is too large is refused, and the next one can be received.
  ASSERT_EQ(
      SendPacket(far->get(), std::string(kPacketBytesMax + 1, 'x'), file.get()),
      0);
  ASSERT_EQ(SendPacket(far->get(), "two", -1), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(ReceivePacket(near->get()).status()));
  EXPECT_EQ((**ReceivePacket(near->get())).bytes, "two");
  far->reset();
  EXPECT_TRUE(absl::IsUnavailable(ReceivePacket(near->get()).status()));
}

// The supervisor makes the socket, and the engine listens on it.
TEST_F(ControlSocketTest, PeerPidIsThatOfWhoeverTookOver) {
  const auto listener = ListenForSupervisor(directory_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_EQ(PeerPid(ConnectToEngine(directory_)->get()), ::getpid());
  const pid_t child = ::fork();
  if (child == 0) ::_exit(TakeListenerOver(listener->get()).ok() ? 0 : 1);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(PeerPid(ConnectToEngine(directory_)->get()), child);
}

}  // namespace
}  // namespace optstate::engine
