#include "server/os/event_loop.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <thread>

namespace optstate::os {
namespace {

using ::testing::ElementsAre;

struct Pipe {
  Pipe() {
    int fds[2];
    EXPECT_EQ(::pipe2(fds, O_CLOEXEC | O_NONBLOCK), 0);
    read.reset(fds[0]);
    write.reset(fds[1]);
  }
  void Fill() { EXPECT_EQ(::write(write.get(), "x", 1), 1); }
  UniqueFd read;
  UniqueFd write;
};

class EventLoopTest : public testing::Test {
 protected:
  std::unique_ptr<EventLoop> loop_ = *EventLoop::Create();
};

TEST_F(EventLoopTest, CallsBackForReadableFds) {
  Pipe pipe;
  pipe.Fill();
  uint32_t seen = 0;
  ASSERT_TRUE(loop_
                  ->Watch(pipe.read.get(), EPOLLIN,
                          [&](uint32_t events) {
                            seen = events;
                            loop_->Stop();
                          })
                  .ok());
  loop_->Run();
  EXPECT_EQ(seen, uint32_t{EPOLLIN});
}

TEST_F(EventLoopTest, TimersRunInOrderAndCancelledOnesDoNot) {
  std::vector<int> ran;
  loop_->RunAfter(absl::Milliseconds(2), [&] {
    ran.push_back(3);
    loop_->Stop();
  });
  loop_->RunAfter(absl::ZeroDuration(), [&] { ran.push_back(1); });
  const auto cancelled =
      loop_->RunAfter(absl::Milliseconds(1), [&] { ran.push_back(2); });
  loop_->Cancel(cancelled);
  loop_->Cancel(cancelled);
  loop_->Run();
  EXPECT_THAT(ran, ElementsAre(1, 3));
}

TEST_F(EventLoopTest, InfinitelyFarIsNotNow) {
  bool ran = false;
  loop_->RunAfter(absl::InfiniteDuration(), [&] { ran = true; });
  loop_->RunAfter(absl::Milliseconds(1), [&] { loop_->Stop(); });
  loop_->Run();
  EXPECT_FALSE(ran);
}

TEST_F(EventLoopTest, PostsOfOneCallerKeepTheirOrder) {
  std::vector<int> ran;
  std::thread caller([&] {
    for (int i = 0; i < 3; ++i) loop_->Post([&ran, i] { ran.push_back(i); });
    loop_->Stop();
  });
  loop_->Run();
  caller.join();
  EXPECT_THAT(ran, ElementsAre(0, 1, 2));
}

TEST_F(EventLoopTest, UnwatchedInTheSameWakeUpIsNotCalled) {
  Pipe a;
  Pipe b;
  a.Fill();
  b.Fill();
  int calls = 0;
  const auto callback = [&](uint32_t) {
    ++calls;
    loop_->Unwatch(a.read.get());
    loop_->Unwatch(b.read.get());
    // A new file with the old number must not get the old one's events.
    Pipe c;
    EXPECT_TRUE(
        loop_->Watch(c.read.get(), EPOLLIN, [&](uint32_t) { calls += 100; })
            .ok());
    loop_->Unwatch(c.read.get());
    loop_->Stop();
  };
  ASSERT_TRUE(loop_->Watch(a.read.get(), EPOLLIN, callback).ok());
  ASSERT_TRUE(loop_->Watch(b.read.get(), EPOLLIN, callback).ok());
  loop_->Run();
  EXPECT_EQ(calls, 1);
}

TEST_F(EventLoopTest, SilencedFdsDoNotWake) {
  Pipe pipe;
  pipe.Fill();
  int calls = 0;
  ASSERT_TRUE(
      loop_->Watch(pipe.read.get(), EPOLLIN, [&](uint32_t) { ++calls; }).ok());
  loop_->SetEvents(pipe.read.get(), 0);
  loop_->RunAfter(absl::Milliseconds(5), [&] { loop_->Stop(); });
  loop_->Run();
  EXPECT_EQ(calls, 0);
}

TEST_F(EventLoopTest, WatchingABadFdFails) {
  EXPECT_FALSE(loop_->Watch(-1, EPOLLIN, [](uint32_t) {}).ok());
}

}  // namespace
}  // namespace optstate::os
