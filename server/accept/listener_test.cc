#include "server/accept/listener.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "server/os/private_directory.h"

namespace optstate::accept {
namespace {

using ::testing::HasSubstr;

class ListenerTest : public testing::Test {
 protected:
  ListenerTest() {
    // The name is short, because socket paths are.
    std::string name = "/tmp/listener-XXXXXX";
    root_ = ::mkdtemp(name.data());
    path_ = root_ + "/d/s.sock";
  }
  ~ListenerTest() override { EXPECT_TRUE(os::RemoveTree(root_).ok()); }

  absl::StatusOr<std::unique_ptr<Listener>> Open(mode_t mode = 0600) {
    return Listener::Open({path_, "", 0}, mode);
  }

  // A listening socket of a process that does not know the lock file.
  UniqueFd Foreign(bool listening) {
    EXPECT_TRUE(os::EnsurePrivateDirectory(root_ + "/d", 0700).ok());
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address),
                     sizeof(address)),
              0);
    if (listening) {
      EXPECT_EQ(::listen(fd.get(), 1), 0);
    }
    return fd;
  }

  mode_t Mode() {
    struct stat info {};
    EXPECT_EQ(::stat(path_.c_str(), &info), 0);
    return info.st_mode & 07777;
  }

  bool Exists() { return ::access(path_.c_str(), F_OK) == 0; }

  std::string root_;
  std::string path_;
};

TEST_F(ListenerTest, CreatesDirectoryAndSocketAndRemovesTheSocket) {
  auto listener = Open(0640);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_EQ((*listener)->name(), "unix:" + path_);
  EXPECT_EQ(Mode(), 0640u);
  listener->reset();
  EXPECT_FALSE(Exists());
}

TEST_F(ListenerTest, ARetiredSocketIsRemoved) {
  std::filesystem::create_directories(
      std::filesystem::path(path_).parent_path());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                   sizeof(address)),
            0);
  ASSERT_EQ(::listen(fd.get(), 1), 0);
  Listener::Retire({path_, "", 0}, std::move(fd), UniqueFd());
  EXPECT_NE(::access(path_.c_str(), F_OK), 0);
  // The file may be gone already.
  Listener::Retire({path_, "", 0}, UniqueFd(), UniqueFd());
}

TEST_F(ListenerTest, WhoListensInPlaceOfARetiredSocketStays) {
  auto other = Listener::Open({path_, "", 0}, 0600);
  ASSERT_TRUE(other.ok()) << other.status();
  Listener::Retire({path_, "", 0}, UniqueFd(), UniqueFd());
  EXPECT_EQ(::access(path_.c_str(), F_OK), 0);
}

TEST_F(ListenerTest, AnInheritedSocketGetsTheModeOfNow) {
  const auto before = Open(0666);
  ASSERT_TRUE(before.ok()) << before.status();
  const auto after =
      Listener::Inherit({path_, "", 0}, UniqueFd(::dup((*before)->fd())),
                        UniqueFd(::dup((*before)->lock_fd())), 0600);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(Mode(), 0600u);
}

TEST_F(ListenerTest, TakesOverAStaleSocket) {
  Foreign(/*listening=*/true);  // closed at once: no process is behind the file
  ASSERT_TRUE(Exists());
  EXPECT_TRUE(Open().ok());
}

TEST_F(ListenerTest, RefusesASocketThatSomebodyServes) {
  const UniqueFd foreign = Foreign(/*listening=*/true);
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(Exists());
}

TEST_F(ListenerTest, RefusesASecondDaemon) {
  const auto first = Open();
  ASSERT_TRUE(first.ok());
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("in use by process"));
  EXPECT_TRUE(Exists());
}

TEST_F(ListenerTest, LeavesOtherFilesAlone) {
  ASSERT_TRUE(os::EnsurePrivateDirectory(root_ + "/d", 0700).ok());
  std::ofstream(path_) << "precious";
  EXPECT_TRUE(absl::IsFailedPrecondition(Open().status()));
  std::ifstream stream(path_);
  std::string text;
  stream >> text;
  EXPECT_EQ(text, "precious");
}

TEST_F(ListenerTest, KeepsASocketThatReplacedItsOwn) {
  auto listener = Open();
  ASSERT_TRUE(listener.ok());
  ASSERT_EQ(::unlink(path_.c_str()), 0);
  const UniqueFd foreign = Foreign(/*listening=*/true);
  listener->reset();
  EXPECT_TRUE(Exists());
}

TEST_F(ListenerTest, TcpNamesThePortThatItGot) {
  const auto listener = Listener::Open({"", "127.0.0.1", 0}, 0);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(absl::StartsWith((*listener)->name(), "127.0.0.1:"));
  EXPECT_FALSE(absl::EndsWith((*listener)->name(), ":0"));
  EXPECT_FALSE((*listener)->is_unix());
}

TEST_F(ListenerTest, TcpErrorsNameTheAddress) {
  const absl::Status status =
      Listener::Open({"", "no.such.host.invalid", 1}, 0).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("no.such.host.invalid"));
}

// The directory is like /tmp/optstate-UID, created by another user who knew its
// name.
TEST_F(ListenerTest, RefusesToListenInAStrangersDirectory) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to give a directory away";
  ASSERT_EQ(::mkdir((root_ + "/d").c_str(), 0700), 0);
  ASSERT_EQ(::chmod((root_ + "/d").c_str(), 0777), 0);
  ASSERT_EQ(::chown((root_ + "/d").c_str(), 4711, 4711), 0);
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("/d belongs to uid 4711, not to uid 0 or root"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--socket"));
  EXPECT_FALSE(Exists());
}

TEST_F(ListenerTest, RefusesADirectoryThatAnybodyMayChange) {
  ASSERT_EQ(::mkdir((root_ + "/d").c_str(), 0700), 0);
  ASSERT_EQ(::chmod((root_ + "/d").c_str(), 0777), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(Open().status()));
  ASSERT_EQ(::chmod((root_ + "/d").c_str(), 01777), 0);
  EXPECT_TRUE(Open().ok());
}

}  // namespace
}  // namespace optstate::accept
