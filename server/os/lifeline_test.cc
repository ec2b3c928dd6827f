#include "server/os/lifeline.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "proto/types/unique_fd.h"

namespace optstate::os {
namespace {

struct Pipe {
  Pipe() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    read = UniqueFd(ends[0]);
    write = UniqueFd(ends[1]);
  }
  UniqueFd read;
  UniqueFd write;
};

// Stops the loop after some more wake-ups, in each of which an fd that is
// readable and watched is dispatched.
void StopAfter(int wake_ups, EventLoop* loop) {
  loop->Post([=] {
    if (wake_ups == 0) return loop->Stop();
    StopAfter(wake_ups - 1, loop);
  });
}

TEST(LifelineTest, TheEndIsToldOnceAndBytesAreNot) {
  const auto loop = *EventLoop::Create();
  Pipe pipe;
  int ends = 0;
  const auto lifeline = Lifeline::Watch(loop.get(), std::move(pipe.read), [&] {
    ++ends;
    StopAfter(3, loop.get());
  });
  ASSERT_TRUE(lifeline.ok()) << lifeline.status();
  ASSERT_EQ(::write(pipe.write.get(), "x", 1), 1);
  loop->Post([&] {
    loop->Post([&] {
      EXPECT_EQ(ends, 0);
      pipe.write = UniqueFd();
    });
  });
  loop->Run();
  EXPECT_EQ(ends, 1);
}

TEST(LifelineTest, ALifelineThatIsGoneIsNotWatched) {
  const auto loop = *EventLoop::Create();
  Pipe pipe;
  int ends = 0;
  auto lifeline =
      Lifeline::Watch(loop.get(), std::move(pipe.read), [&] { ++ends; });
  ASSERT_TRUE(lifeline.ok()) << lifeline.status();
  lifeline->reset();
  pipe.write = UniqueFd();
  StopAfter(3, loop.get());
  loop->Run();
  EXPECT_EQ(ends, 0);
}

}  // namespace
}  // namespace optstate::os
