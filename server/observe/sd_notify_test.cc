#include "server/observe/sd_notify.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/types/unique_fd.h"

namespace optstate::observe {
namespace {

class SdNotifyTest : public testing::Test {
 protected:
  ~SdNotifyTest() override { ::unsetenv("NOTIFY_SOCKET"); }

  // Listens as systemd does: on a datagram socket, at "@..." an abstract one.
  void Listen(const std::string& name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    ASSERT_EQ(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address),
                     static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) +
                                            name.size())),
              0);
    ::setenv("NOTIFY_SOCKET", name.c_str(), 1);
  }

  std::string Received() {
    char text[64];
    const ssize_t size =
        ::recv(socket_.get(), text, sizeof(text), MSG_DONTWAIT);
    return size < 0 ? "" : std::string(text, static_cast<size_t>(size));
  }

  UniqueFd socket_{::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
};

TEST_F(SdNotifyTest, WithoutServiceManager) {
  EXPECT_TRUE(NotifyServiceManager("READY=1").ok());
}

TEST_F(SdNotifyTest, Path) {
  const std::string path = absl::StrCat("/tmp/notify-", ::getpid());
  Listen(path);
  EXPECT_TRUE(NotifyServiceManager("READY=1").ok());
  EXPECT_EQ(Received(), "READY=1");
  ::unlink(path.c_str());
}

TEST_F(SdNotifyTest, AbstractName) {
  Listen(absl::StrCat("@optstate-notify-", ::getpid()));
  EXPECT_TRUE(NotifyServiceManager("STOPPING=1").ok());
  EXPECT_EQ(Received(), "STOPPING=1");
}

TEST_F(SdNotifyTest, NoReceiverIsThere) {
  ::setenv("NOTIFY_SOCKET", "/no/such/socket", 1);
  EXPECT_FALSE(NotifyServiceManager("READY=1").ok());
  ::setenv("NOTIFY_SOCKET", std::string(300, 'x').c_str(), 1);
  EXPECT_FALSE(NotifyServiceManager("READY=1").ok());
}

TEST(WatchdogLimitTest, IsForOneProcess) {
  EXPECT_EQ(WatchdogLimit(), absl::InfiniteDuration());
  ::setenv("WATCHDOG_USEC", "30000000", 1);
  EXPECT_EQ(WatchdogLimit(), absl::Seconds(30));
  ::setenv("WATCHDOG_PID", absl::StrCat(::getpid()).c_str(), 1);
  EXPECT_EQ(WatchdogLimit(), absl::Seconds(30));
  ::setenv("WATCHDOG_PID", absl::StrCat(::getppid()).c_str(), 1);
  EXPECT_EQ(WatchdogLimit(), absl::InfiniteDuration());
  ::unsetenv("WATCHDOG_PID");
  for (const char* none : {"", "0", "-1", "soon"}) {
    ::setenv("WATCHDOG_USEC", none, 1);
    EXPECT_EQ(WatchdogLimit(), absl::InfiniteDuration()) << none;
  }
  ::unsetenv("WATCHDOG_USEC");
}

}  // namespace
}  // namespace optstate::observe
