#include "server/admin/shared_listing.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace optstate::admin {
namespace {

constexpr size_t kFollowers = 8;

// Names the job after the question.
SharedListing::Jobs Numbered(int question) {
  SharedListing::Jobs jobs(1);
  jobs[0].set_name(absl::StrCat("question ", question));
  return jobs;
}

TEST(SharedListingTest, CallersOneAfterTheOtherAskEach) {
  SharedListing listing;
  int asked = 0;
  const auto ask = [&asked] { return Numbered(++asked); };
  EXPECT_EQ(listing.Get(ask)->at(0).name(), "question 1");
  EXPECT_EQ(listing.Get(ask)->at(0).name(), "question 2");
  EXPECT_EQ(listing.waiting(), 0u);
}

TEST(SharedListingTest, WhoComesMeanwhileSharesTheNextQuestion) {
  SharedListing listing;
  std::atomic<int> asked{0};
  absl::Notification begun;
  absl::Notification may_end;
  std::string first;
  std::thread leader([&] {
    first = listing
                .Get([&] {
                  const int question = ++asked;
                  begun.Notify();
                  may_end.WaitForNotification();
                  return Numbered(question);
                })
                ->at(0)
                .name();
  });
  begun.WaitForNotification();
  std::string found[kFollowers];
  std::thread followers[kFollowers];
  for (size_t i = 0; i < kFollowers; ++i) {
    followers[i] = std::thread([&, i] {
      found[i] = listing.Get([&] { return Numbered(++asked); })->at(0).name();
    });
  }
  while (listing.waiting() != kFollowers) std::this_thread::yield();
  may_end.Notify();
  leader.join();
  for (std::thread& follower : followers) follower.join();
  EXPECT_EQ(first, "question 1");
  for (const std::string& name : found) EXPECT_EQ(name, "question 2");
  EXPECT_EQ(asked.load(), 2);
  EXPECT_EQ(listing.waiting(), 0u);
}

// There is never more than one question under way, and no caller gets one that
// had begun before his call.
TEST(SharedListingTest, NoAnswerIsOlderThanItsCall) {
  SharedListing listing;
  std::atomic<int> now{0};
  std::atomic<int> under_way{0};
  std::thread callers[kFollowers];
  for (std::thread& caller : callers) {
    caller = std::thread([&] {
      for (int i = 0; i < 1000; ++i) {
        const int before = ++now;
        const auto jobs = listing.Get([&] {
          EXPECT_EQ(++under_way, 1);
          SharedListing::Jobs found(1);
          found[0].set_committed_step(static_cast<uint64_t>(now.load()));
          --under_way;
          return found;
        });
        EXPECT_GE(jobs->at(0).committed_step(), static_cast<uint64_t>(before));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace optstate::admin
