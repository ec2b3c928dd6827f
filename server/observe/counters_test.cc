#include "server/observe/counters.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

namespace optstate::observe {
namespace {

TEST(CountersTest, EachThingHasItsOwnCount) {
  const uint64_t died = CountOf(Counted::kEngineDied);
  const uint64_t started = CountOf(Counted::kEngineStarted);
  Count(Counted::kEngineDied);
  Count(Counted::kEngineDied);
  EXPECT_EQ(CountOf(Counted::kEngineDied), died + 2);
  EXPECT_EQ(CountOf(Counted::kEngineStarted), started);
}

TEST(CountersTest, AnswersAreCountedByCode) {
  constexpr auto kBusy = absl::StatusCode::kResourceExhausted;
  const uint64_t busy = CountOf(Answered::kSession, kBusy);
  const uint64_t calls = CountOf(Answered::kAdminCall, kBusy);
  Count(Answered::kSession, kBusy);
  EXPECT_EQ(CountOf(Answered::kSession, kBusy), busy + 1);
  EXPECT_EQ(CountOf(Answered::kAdminCall, kBusy), calls);
}

TEST(CountersTest, CodeThatAbslDoesNotKnow) {
  const uint64_t unknown =
      CountOf(Answered::kAdminCall, absl::StatusCode::kUnknown);
  Count(Answered::kAdminCall, static_cast<absl::StatusCode>(99));
  Count(Answered::kAdminCall, static_cast<absl::StatusCode>(-1));
  EXPECT_EQ(CountOf(Answered::kAdminCall, absl::StatusCode::kUnknown),
            unknown + 2);
}

TEST(CountersTest, AQueueIsAsLongAsWhatIsInIt) {
  const uint64_t removals = LengthOf(Queue::kRemoval);
  const uint64_t engines = LengthOf(Queue::kEngine);
  {
    std::vector<InQueue> waiting;
    for (int i = 0; i < 5; ++i) waiting.emplace_back(Queue::kEngine);
    EXPECT_EQ(LengthOf(Queue::kEngine), engines + 5);
    EXPECT_EQ(LengthOf(Queue::kRemoval), removals);
    waiting.erase(waiting.begin());
    EXPECT_EQ(LengthOf(Queue::kEngine), engines + 4);
    const InQueue taken = std::move(waiting.back());
    waiting.pop_back();
    EXPECT_EQ(LengthOf(Queue::kEngine), engines + 4);
    waiting.front() = InQueue(Queue::kRemoval);
    EXPECT_EQ(LengthOf(Queue::kEngine), engines + 3);
    EXPECT_EQ(LengthOf(Queue::kRemoval), removals + 1);
  }
  EXPECT_EQ(LengthOf(Queue::kEngine), engines);
  EXPECT_EQ(LengthOf(Queue::kRemoval), removals);
}

TEST(CountersTest, ThreadsLoseNoCount) {
  const uint64_t before = CountOf(Counted::kConnectionAccepted);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int count = 0; count < 10000; ++count) {
        Count(Counted::kConnectionAccepted);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(CountOf(Counted::kConnectionAccepted), before + 40000);
}

}  // namespace
}  // namespace optstate::observe
