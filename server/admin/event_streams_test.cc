#include "server/admin/event_streams.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace optstate::admin {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kStreamsMax = 2;

class EventStreamsTest : public testing::Test {
 protected:
  void Add(const std::string& text, const std::string& job = "") {
    v1::Event event;
    event.set_text(text);
    event.set_job(job);
    log_.Add(std::move(event));
  }

  absl::Status Send(const v1::WatchEventsRequest& request,
                    absl::Time deadline = absl::InfiniteFuture()) {
    return streams_.Send(request, deadline, /*caller=*/nullptr,
                         [this](const v1::Event& event) {
                           const absl::MutexLock lock(&mutex_);
                           seen_.push_back(event.text());
                           return event.text() != "the last that it takes";
                         });
  }

  void AwaitSeen(size_t count) {
    const absl::MutexLock lock(&mutex_);
    const auto enough = [this, count] { return seen_.size() >= count; };
    mutex_.Await(absl::Condition(&enough));
  }

  static v1::WatchEventsRequest Following() {
    v1::WatchEventsRequest request;
    request.set_follow(true);
    return request;
  }

  observe::EventLog log_;
  EventStreams streams_{&log_, kStreamsMax};
  absl::Mutex mutex_;
  std::vector<std::string> seen_;
};

TEST_F(EventStreamsTest, WhatIsRememberedIsSent) {
  EXPECT_TRUE(Send({}).ok());
  EXPECT_THAT(seen_, IsEmpty());
  Add("1", "a");
  Add("2", "b");
  Add("3", "a");
  EXPECT_TRUE(Send({}).ok());
  EXPECT_THAT(seen_, ElementsAre("1", "2", "3"));
  seen_.clear();
  v1::WatchEventsRequest request;
  request.set_job("a");
  request.set_after_sequence(log_.After(0)[0].sequence());
  EXPECT_TRUE(Send(request).ok());
  EXPECT_THAT(seen_, ElementsAre("3"));
}

TEST_F(EventStreamsTest, ANumberAboveTheLastIsOfAnEarlierDaemon) {
  Add("1");
  v1::WatchEventsRequest request;
  request.set_after_sequence(log_.After(0)[0].sequence());
  EXPECT_TRUE(Send(request).ok());
  EXPECT_THAT(seen_, IsEmpty());
  request.set_after_sequence(request.after_sequence() + 1);
  EXPECT_TRUE(Send(request).ok());
  EXPECT_THAT(seen_, ElementsAre("1"));
}

TEST_F(EventStreamsTest, AFollowerGetsWhatHappensUntilItGoes) {
  Add("before");
  absl::Status status;
  std::thread follower([&] { status = Send(Following()); });
  AwaitSeen(1);
  Add("meanwhile");
  AwaitSeen(2);
  Add("the last that it takes");
  follower.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_THAT(seen_,
              ElementsAre("before", "meanwhile", "the last that it takes"));
}

TEST_F(EventStreamsTest, AFollowerOfAJobSeesNoOther) {
  v1::WatchEventsRequest request = Following();
  request.set_job("a");
  std::thread follower([&] { (void)Send(request); });
  Add("of another", "b");
  Add("of it", "a");
  AwaitSeen(1);
  Add("of another", "b");
  Add("the last that it takes", "a");
  follower.join();
  EXPECT_THAT(seen_, ElementsAre("of it", "the last that it takes"));
}

TEST_F(EventStreamsTest, TheDeadlineIsNoError) {
  Add("1");
  const absl::Status status =
      Send(Following(), absl::Now() + absl::Milliseconds(1));
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(seen_, ElementsAre("1"));
}

// Events of before the end arrive, such as that the daemon ends.
TEST_F(EventStreamsTest, TheDaemonsEndEndsFollowers) {
  absl::Status status;
  std::thread follower([&] { status = Send(Following()); });
  Add("the daemon ends");
  streams_.End();
  follower.join();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(seen_, ElementsAre("the daemon ends"));
  EXPECT_TRUE(absl::IsUnavailable(Send(Following())));
}

TEST_F(EventStreamsTest, TheirNumberIsLimited) {
  Add("to be seen");
  std::vector<std::thread> followers;
  for (size_t i = 0; i < kStreamsMax; ++i) {
    followers.emplace_back([&] { (void)Send(Following()); });
  }
  AwaitSeen(kStreamsMax);
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = Send(Following());
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("2 times already"));
  }
  Add("the last that it takes");
  for (std::thread& follower : followers) follower.join();
  EXPECT_TRUE(absl::IsCancelled(Send(Following())));
}

TEST_F(EventStreamsTest, NoJobHasThatName) {
  v1::WatchEventsRequest request;
  request.set_job("../a");
  EXPECT_TRUE(absl::IsInvalidArgument(Send(request)));
}

}  // namespace
}  // namespace optstate::admin
