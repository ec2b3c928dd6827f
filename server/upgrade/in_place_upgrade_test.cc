#include "server/upgrade/in_place_upgrade.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/os/event_loop.h"
#include "server/upgrade/build_check.h"

namespace optstate::upgrade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// An upgrade whose daemon is this test. It never succeeds: the next build would
// run in place of the test.
class InPlaceUpgradeTest : public testing::Test {
 protected:
  InPlaceUpgradeTest() {
    const std::string versions = directory_ + ".versions";
    std::ofstream(versions) << OwnFormatVersions().DebugString();
    std::ofstream(build_) << "#!/bin/sh\ncase \"$*\" in --format-versions) "
                             "exec cat "
                          << versions << ";; esac\nexit 0\n";
    ::chmod(build_.c_str(), 0700);
  }
  ~InPlaceUpgradeTest() override {
    std::filesystem::remove(build_);
    std::filesystem::remove(directory_ + ".versions");
  }

  InPlaceUpgrade::Callbacks Callbacks() {
    return {
        .load_config = [this] { return config_; },
        .open_missing = [this](const v1::DaemonConfig&)
            -> absl::StatusOr<accept::ListenersByAddress> {
          events_.push_back("open");
          if (!can_open_.ok()) return can_open_;
          return accept::ListenersByAddress();
        },
        .pause =
            [this] {
              events_.push_back("pause");
              on_pause_();
            },
        .end_calls = [this] { events_.push_back("end calls"); },
        .hand_over =
            [this](const accept::ListenersByAddress&, v1::SupervisorHandover*) {
              events_.push_back("hand over");
            },
        .resume =
            [this] {
              events_.push_back("resume");
              loop_->Stop();
            },
        .on_signal =
            [this](int signal) {
              events_.push_back("signal " + std::to_string(signal));
            }};
  }

  InPlaceUpgrade::Options Options() {
    return {
        .loop = loop_.get(), .record = &record_, .arguments = {"optstated"}};
  }

  // Calls Upgrade() as the Admin service does, from another thread. The loop
  // stops when the call fails, or with resume().
  absl::Status Upgrade(InPlaceUpgrade* upgrade) {
    absl::Status result;
    std::thread caller([&] {
      result = upgrade->Upgrade(build_).status();
      if (!result.ok()) loop_->Stop();
    });
    loop_->Run();
    caller.join();
    return result;
  }

  const std::unique_ptr<os::EventLoop> loop_ = *os::EventLoop::Create();
  UpgradeRecord record_;
  absl::StatusOr<v1::DaemonConfig> config_ = v1::DaemonConfig();
  absl::Status can_open_;
  std::function<void()> on_pause_ = [] {};
  std::vector<std::string> events_;
  const std::string directory_ =
      testing::TempDir() + "/upgrade." + std::to_string(::getpid());
  const std::string build_ = directory_ + ".build";
};

TEST_F(InPlaceUpgradeTest, ABuildThatCannotBeExecutedChangesNothing) {
  // The build passes the check, and is gone when its turn comes.
  on_pause_ = [this] { std::filesystem::remove(build_); };
  InPlaceUpgrade upgrade(Options(), Callbacks());
  EXPECT_TRUE(Upgrade(&upgrade).ok());
  EXPECT_THAT(events_,
              ElementsAre("open", "pause", "end calls", "hand over", "resume"));
  EXPECT_FALSE(record_.under_way());
  ASSERT_EQ(record_.Get().problems_size(), 1);
  EXPECT_THAT(record_.Get().problems(0), HasSubstr("execute " + build_));
}

TEST_F(InPlaceUpgradeTest, ASignalPreventsTheUpgradeAndIsHandledAfterIt) {
  InPlaceUpgrade upgrade(Options(), Callbacks());
  EXPECT_FALSE(upgrade.Interrupt(SIGTERM));
  on_pause_ = [&] { EXPECT_TRUE(upgrade.Interrupt(SIGTERM)); };
  EXPECT_TRUE(Upgrade(&upgrade).ok());
  EXPECT_THAT(events_, ElementsAre("open", "pause", "end calls", "resume",
                                   "signal " + std::to_string(SIGTERM)));
  EXPECT_FALSE(upgrade.Interrupt(SIGTERM));
}

TEST_F(InPlaceUpgradeTest, WithoutItsListenersABuildDoesNotTakeOver) {
  can_open_ = absl::InvalidArgumentError("no such address");
  InPlaceUpgrade upgrade(Options(), Callbacks());
  EXPECT_TRUE(absl::IsFailedPrecondition(Upgrade(&upgrade)));
  EXPECT_THAT(events_, ElementsAre("open"));
  EXPECT_TRUE(record_.Get().id().empty());
}

TEST_F(InPlaceUpgradeTest, AConfigurationThatCannotFollowIsTheAnswer) {
  config_ = absl::FailedPreconditionError("another state_dir");
  InPlaceUpgrade upgrade(Options(), Callbacks());
  EXPECT_EQ(Upgrade(&upgrade), config_.status());
  EXPECT_THAT(events_, IsEmpty());
}

TEST_F(InPlaceUpgradeTest, ADaemonThatEndsOrIsPrivateIsNotUpgraded) {
  InPlaceUpgrade upgrade(Options(), Callbacks());
  upgrade.Close();
  EXPECT_TRUE(absl::IsUnavailable(Upgrade(&upgrade)));
  upgrade.OnHangup();
  InPlaceUpgrade::Options options = Options();
  options.is_private = true;
  InPlaceUpgrade of_private(options, Callbacks());
  EXPECT_TRUE(absl::IsFailedPrecondition(of_private.Upgrade("").status()));
  of_private.OnHangup();
  EXPECT_THAT(events_, IsEmpty());
}

TEST_F(InPlaceUpgradeTest, OneUpgradeAtATime) {
  record_.Begin("engines are being replaced");
  InPlaceUpgrade upgrade(Options(), Callbacks());
  EXPECT_TRUE(absl::IsUnavailable(Upgrade(&upgrade)));
  EXPECT_THAT(events_, IsEmpty());
  EXPECT_EQ(record_.Get().id(), "engines are being replaced");
}

}  // namespace
}  // namespace optstate::upgrade
