#include "server/admin/shared_answers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace optstate::admin {
namespace {

constexpr size_t kFollowers = 8;

using Answers = SharedAnswers<int>;

TEST(SharedAnswersTest, CallersOneAfterTheOtherAskEach) {
  Answers answers;
  int asked = 0;
  const auto ask = [&asked] { return ++asked; };
  EXPECT_EQ(*answers.Get("a", ask), 1);
  EXPECT_EQ(*answers.Get("a", ask), 2);
  EXPECT_EQ(answers.CountWaiting("a"), 0u);
  EXPECT_EQ(answers.size(), 0u);
}

TEST(SharedAnswersTest, WhoComesMeanwhileSharesTheNextQuestion) {
  Answers answers;
  std::atomic<int> asked{0};
  absl::Notification begun;
  absl::Notification may_end;
  int first = 0;
  std::thread leader([&] {
    first = *answers.Get("a", [&] {
      const int question = ++asked;
      begun.Notify();
      may_end.WaitForNotification();
      return question;
    });
  });
  begun.WaitForNotification();
  int found[kFollowers] = {};
  std::thread followers[kFollowers];
  for (size_t i = 0; i < kFollowers; ++i) {
    followers[i] = std::thread(
        [&, i] { found[i] = *answers.Get("a", [&] { return ++asked; }); });
  }
  while (answers.CountWaiting("a") != kFollowers) std::this_thread::yield();
  EXPECT_EQ(answers.size(), 1u);
  may_end.Notify();
  leader.join();
  for (std::thread& follower : followers) follower.join();
  EXPECT_EQ(first, 1);
  for (const int each : found) EXPECT_EQ(each, 2);
  EXPECT_EQ(asked.load(), 2);
  EXPECT_EQ(answers.size(), 0u);
}

// A question with another key neither waits nor is shared.
TEST(SharedAnswersTest, KeysDoNotWaitForEachOther) {
  Answers answers;
  absl::Notification begun;
  absl::Notification may_end;
  std::thread leader([&] {
    answers.Get("a", [&] {
      begun.Notify();
      may_end.WaitForNotification();
      return 1;
    });
  });
  begun.WaitForNotification();
  EXPECT_EQ(*answers.Get("b", [] { return 2; }), 2);
  EXPECT_EQ(answers.size(), 1u);
  may_end.Notify();
  leader.join();
}

// There is never more than one question of a key under way, and no caller gets
// one that had begun before his call.
TEST(SharedAnswersTest, NoAnswerIsOlderThanItsCall) {
  Answers answers;
  constexpr size_t kKeys = 2;
  std::atomic<int> now[kKeys] = {};
  std::atomic<int> under_way[kKeys] = {};
  std::thread callers[kFollowers];
  for (size_t c = 0; c < kFollowers; ++c) {
    callers[c] = std::thread([&, c] {
      for (size_t i = 0; i < 1000; ++i) {
        const size_t k = (c + i / 10) % kKeys;
        const int before = ++now[k];
        const auto answer = answers.Get(absl::StrCat(k), [&] {
          EXPECT_EQ(++under_way[k], 1);
          const int found = now[k];
          --under_way[k];
          return found;
        });
        EXPECT_GE(*answer, before);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(answers.size(), 0u);
}

}  // namespace
}  // namespace optstate::admin
