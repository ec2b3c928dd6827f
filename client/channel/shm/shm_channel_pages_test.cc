// Tests that the pages of gradients may come after the attach, and that the
// client neither writes nor pushes gradients before they have come. The engine
// is a thread that follows the test's script.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "client/channel/shm/fake_shm_engine.h"
#include "client/channel/shm/shm_channel.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

// The kernel, but pages of gradients come, or do not, when the test says so.
class HeldPages {
 public:
  PopulateFunction Function() {
    return [this](std::byte* data, uint64_t bytes) {
      // The first call is for the pages before the gradients.
      if (calls_.fetch_add(1) == 0) return shm::PopulatePages(data, bytes);
      begun_.Notify();
      let_go_.WaitForNotification();
      return fails ? absl::ResourceExhaustedError("none left")
                   : shm::PopulatePages(data, bytes);
    };
  }
  void LetGo() {
    if (!has_let_go_.exchange(true)) let_go_.Notify();
  }
  // An interrupt check that lets the pages go when a wait calls it after
  // `armed` was set.
  InterruptCheck LettingGo() {
    return [this] {
      if (armed) LetGo();
      return false;
    };
  }
  // Waits until the populating thread has begun: what the test's thread then
  // waits for, it cannot do itself.
  void AwaitBegun() { begun_.WaitForNotification(); }
  bool has_let_go() const { return has_let_go_; }

  bool fails = false;
  std::atomic<bool> armed = false;

 private:
  std::atomic<int> calls_ = 0;
  std::atomic<bool> has_let_go_ = false;
  absl::Notification begun_;
  absl::Notification let_go_;
};

class ShmChannelPagesTest : public testing::Test {
 protected:
  ~ShmChannelPagesTest() override { pages_.LetGo(); }

  std::unique_ptr<Session> Open(FakeShmDaemon::Script script) {
    daemon_ = std::make_unique<FakeShmDaemon>(std::move(script));
    SessionOptions options;
    options.job = "job";
    options.layout = LayoutOfTest();
    options.interrupted = pages_.LettingGo();
    auto session = Session::OpenOver(
        [&](ChannelSetup setup) -> absl::StatusOr<std::unique_ptr<Channel>> {
          return std::make_unique<ShmChannel>(
              daemon_->endpoint(), std::move(setup), pages_.Function());
        },
        options);
    EXPECT_TRUE(session.ok()) << session.status();
    // From here on only a wait for the pages can bring them.
    EXPECT_FALSE(pages_.has_let_go()) << "the attach waited for them";
    pages_.AwaitBegun();
    pages_.armed = true;
    return *std::move(session);
  }

  // An engine that takes one push, and looks at its gradients.
  FakeShmDaemon::Script TakesAPush() {
    return [this](FakeShmEngine& engine) {
      engine.pages_may_follow = true;
      engine.Admit();
      EXPECT_TRUE(engine.pages_follow);
      Completion answer = {};
      answer.request_id = engine.Take().request_id;
      pushed_ = engine.Gradients();
      engine.Answer(answer);
      engine.TakeDetach();
    };
  }

  static absl::Status PushCopied(Session& session) {
    const std::vector<float> gradient(100, 3);
    const uint32_t parameter = 0;
    const void* const address = gradient.data();
    return session.PushGradients(1, 0, {&parameter, 1}, {&address, 1});
  }

  HeldPages pages_;
  std::vector<float> pushed_;
  std::unique_ptr<FakeShmDaemon> daemon_;
};

TEST_F(ShmChannelPagesTest, WhatIsCopiedAndPushedWaitsForItsPages) {
  const auto session = Open(TakesAPush());
  absl::Status status = PushCopied(*session);
  EXPECT_TRUE(pages_.has_let_go()) << "it did not wait";
  pages_.LetGo();
  if (status.ok()) status = session->Flush();
  EXPECT_TRUE(status.ok()) << status;
  session->Close();
  daemon_.reset();
  EXPECT_EQ(pushed_, std::vector<float>(100, 3));
}

TEST_F(ShmChannelPagesTest, WhoeverIsToWriteGradientsWaitsForTheirPages) {
  const auto session = Open(TakesAPush());
  const auto gradient = session->gradient(0);
  EXPECT_TRUE(pages_.has_let_go()) << "it did not wait";
  pages_.LetGo();
  ASSERT_TRUE(gradient.ok()) << gradient.status();
  const std::vector<float> values(100, 5);
  ASSERT_EQ(gradient->size(), values.size() * sizeof(float));
  std::memcpy(gradient->data(), values.data(), gradient->size());
  absl::Status status = session->Push(1, 0, 0, 1);
  if (status.ok()) status = session->Flush();
  EXPECT_TRUE(status.ok()) << status;
  session->Close();
  daemon_.reset();
  EXPECT_EQ(pushed_, values);
}

// Gradients that were never written are zeros.
TEST_F(ShmChannelPagesTest, APushAloneWaitsToo) {
  const auto session = Open(TakesAPush());
  absl::Status status = session->Push(1, 0, 0, 1);
  EXPECT_TRUE(pages_.has_let_go()) << "it did not wait";
  pages_.LetGo();
  if (status.ok()) status = session->Flush();
  EXPECT_TRUE(status.ok()) << status;
  session->Close();
  daemon_.reset();
  EXPECT_EQ(pushed_, std::vector<float>(100, 0));
}

TEST_F(ShmChannelPagesTest, PagesThatDoNotComeAreAnError) {
  pages_.fails = true;
  const auto session = Open([](FakeShmEngine& engine) {
    engine.pages_may_follow = true;
    engine.Admit();
    engine.TakeDetach();  // and no push before
  });
  const absl::Status statuses[] = {PushCopied(*session),
                                   session->Push(1, 0, 0, 1),
                                   session->gradient(0).status()};
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("none left"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("close the session"));
  }
  session->Close();
}

// The fake engine checks that the segment has no holes, as an older one does.
TEST_F(ShmChannelPagesTest, AnOlderEngineGetsAllPagesAtOnce) {
  FakeShmDaemon daemon([](FakeShmEngine& engine) {
    engine.Admit();
    EXPECT_FALSE(engine.pages_follow);
  });
  ShmChannel channel(daemon.endpoint(), SetupOfTest(), pages_.Function());
  const absl::Status status = channel.Connect(false, Soon()).status();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(channel.AwaitGradientArea(400).ok());
  pages_.LetGo();
}

TEST_F(ShmChannelPagesTest, AKernelThatCannotPopulateReserves) {
  FakeShmDaemon daemon([](FakeShmEngine& engine) {
    engine.pages_may_follow = true;
    engine.Admit();
    EXPECT_FALSE(engine.pages_follow);
  });
  ShmChannel channel(daemon.endpoint(), SetupOfTest(),
                     [](std::byte*, uint64_t) {
                       return absl::UnimplementedError("an old kernel");
                     });
  const absl::Status status = channel.Connect(false, Soon()).status();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(channel.AwaitGradientArea(400).ok());
}

// An upgrade was undone, say, before all pages had come.
TEST_F(ShmChannelPagesTest, AnOlderEngineThatFollowsGetsAllPagesFirst) {
  FakeShmDaemon daemon({[](FakeShmEngine& engine) {
                          engine.pages_may_follow = true;
                          engine.Admit();
                          EXPECT_TRUE(engine.pages_follow);
                        },
                        [this](FakeShmEngine& engine) {
                          engine.on_register = [this] { pages_.armed = true; };
                          engine.Admit();
                          EXPECT_FALSE(engine.pages_follow);
                        }});
  ChannelSetup setup = SetupOfTest();
  setup.interrupted = pages_.LettingGo();
  ShmChannel channel(daemon.endpoint(), std::move(setup), pages_.Function());
  ASSERT_TRUE(channel.Connect(false, Soon()).ok());
  EXPECT_FALSE(pages_.has_let_go());
  pages_.AwaitBegun();
  const absl::Status status = channel.Connect(true, Soon()).status();
  EXPECT_TRUE(status.ok()) << status;
  pages_.LetGo();
}

}  // namespace
}  // namespace optstate::client
