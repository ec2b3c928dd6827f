#include "server/accept/configured_listeners.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/os/private_directory.h"

namespace optstate::accept {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ConfiguredListenersTest : public testing::Test {
 protected:
  ConfiguredListenersTest() {
    // The name is short, because socket paths are.
    std::string name = "/tmp/listeners-XXXXXX";
    root_ = ::mkdtemp(name.data());
    own_.set_socket(root_ + "/s");
    own_.set_socket_mode(0600);
    own_.add_listen(Address("a"));
  }
  ~ConfiguredListenersTest() override {
    EXPECT_TRUE(os::RemoveTree(root_).ok());
  }

  std::string Address(const std::string& name) const {
    return "unix:" + root_ + "/" + name;
  }
  bool Exists(const std::string& name) const {
    return ::access((root_ + "/" + name).c_str(), F_OK) == 0;
  }

  // Makes the configured socket as the service manager does.
  int MakeActivated() const {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, own_.socket().c_str());
    EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address),
                     sizeof(address)),
              0);
    EXPECT_EQ(::chmod(own_.socket().c_str(), 0600), 0);
    EXPECT_EQ(::listen(fd, 16), 0);
    return fd;
  }

  // Hands `listeners` over as executing another build does: only numbers of fds
  // are left of them, and no destructor removes the sockets' files.
  v1::SupervisorHandover Execute(Listeners listeners) const {
    v1::SupervisorHandover handover;
    HandOverListeners(own_, listeners, {}, &handover);
    for (auto& one : *handover.mutable_listeners()) {
      one.set_fd(::dup(one.fd()));
      if (one.lock_fd() >= 0) one.set_lock_fd(::dup(one.lock_fd()));
    }
    for (const char* name : {"s", "a"}) Move(name, absl::StrCat(name, "-"));
    listeners.clear();
    for (const char* name : {"s", "a"}) Move(absl::StrCat(name, "-"), name);
    return handover;
  }
  void Move(const std::string& from, const std::string& to) const {
    std::filesystem::rename(root_ + "/" + from, root_ + "/" + to);
  }

  std::string root_;
  v1::DaemonConfig own_;
};

TEST_F(ConfiguredListenersTest, TheSocketComesFirst) {
  EXPECT_THAT(AddressesOf(own_), ElementsAre(Address("s"), Address("a")));
  const auto listeners = OpenListeners(own_, nullptr);
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  ASSERT_EQ(listeners->size(), 2u);
  EXPECT_EQ((*listeners)[0]->name(), Address("s"));
  EXPECT_EQ((*listeners)[1]->name(), Address("a"));
}

TEST_F(ConfiguredListenersTest, NothingIsMissingWhileAllCanBeReached) {
  const auto listeners = OpenListeners(own_, nullptr);
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  const auto missing = OpenMissing(own_, *listeners, own_);
  ASSERT_TRUE(missing.ok()) << missing.status();
  EXPECT_THAT(*missing, IsEmpty());
}

TEST_F(ConfiguredListenersTest, NewAddressesAndRemovedSocketsAreMissing) {
  const auto listeners = OpenListeners(own_, nullptr);
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  ASSERT_EQ(::unlink((root_ + "/a").c_str()), 0);
  v1::DaemonConfig next = own_;
  next.add_listen(Address("b"));
  const auto missing = OpenMissing(own_, *listeners, next);
  ASSERT_TRUE(missing.ok()) << missing.status();
  ASSERT_EQ(missing->size(), 2u);
  EXPECT_TRUE(missing->contains(Address("a")));
  EXPECT_TRUE(missing->contains(Address("b")));
  EXPECT_TRUE(Exists("a"));
}

TEST_F(ConfiguredListenersTest, AHandoverKeepsTheLockOfAReopenedSocket) {
  const auto listeners = OpenListeners(own_, nullptr);
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  ASSERT_EQ(::unlink((root_ + "/a").c_str()), 0);
  const auto missing = OpenMissing(own_, *listeners, own_);
  ASSERT_TRUE(missing.ok()) << missing.status();
  v1::SupervisorHandover handover;
  HandOverListeners(own_, *listeners, *missing, &handover);
  ASSERT_EQ(handover.listeners_size(), 2);
  EXPECT_EQ(handover.listeners(0).address(), Address("a"));
  EXPECT_EQ(handover.listeners(0).fd(), missing->at(Address("a"))->fd());
  EXPECT_EQ(handover.listeners(0).lock_fd(), (*listeners)[1]->lock_fd());
}

TEST_F(ConfiguredListenersTest, TheNextBuildInheritsOrRetires) {
  auto before = OpenListeners(own_, nullptr);
  ASSERT_TRUE(before.ok()) << before.status();
  const v1::SupervisorHandover handover = Execute(*std::move(before));
  v1::DaemonConfig next = own_;
  next.clear_listen();
  const auto after = OpenListeners(next, &handover);
  ASSERT_TRUE(after.ok()) << after.status();
  ASSERT_EQ(after->size(), 1u);
  EXPECT_EQ((*after)[0]->name(), Address("s"));
  EXPECT_TRUE(Exists("s"));
  EXPECT_FALSE(Exists("a"));
}

// Its file is the service manager's, also for builds after the first.
TEST_F(ConfiguredListenersTest, AnActivatedSocketOutlivesBuilds) {
  const int fd = MakeActivated();
  auto before = OpenListeners(own_, nullptr, {{fd, kActivatedSocket}});
  ASSERT_TRUE(before.ok()) << before.status();
  ASSERT_EQ(before->size(), 2u);
  EXPECT_EQ((*before)[0]->fd(), fd);
  const v1::SupervisorHandover handover = Execute(*std::move(before));
  auto after = OpenListeners(own_, &handover);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ((*after)[0]->name(), Address("s"));
  const auto missing = OpenMissing(own_, *after, own_);
  ASSERT_TRUE(missing.ok()) << missing.status();
  EXPECT_THAT(*missing, IsEmpty());
  after->clear();
  EXPECT_TRUE(Exists("s"));
  EXPECT_FALSE(Exists("a"));
}

// The daemon listens in the place of one whose file was removed.
TEST_F(ConfiguredListenersTest, AnActivatedSocketThatWasRemovedIsMissing) {
  const int fd = MakeActivated();
  const auto listeners = OpenListeners(own_, nullptr, {{fd, kActivatedSocket}});
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  ASSERT_EQ(::unlink(own_.socket().c_str()), 0);
  const auto missing = OpenMissing(own_, *listeners, own_);
  ASSERT_TRUE(missing.ok()) << missing.status();
  ASSERT_EQ(missing->size(), 1u);
  EXPECT_GE(missing->at(Address("s"))->lock_fd(), 0);
}

}  // namespace
}  // namespace optstate::accept
