// Callers who ask about jobs at the same time.

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/access/caller.h"
#include "server/admin/admin_service_fixture.h"
#include "server/supervisor/permissions.h"

namespace optstate::admin {
namespace {

constexpr size_t kFollowers = 8;

// A user whom this test certainly does not run as.
const access::Caller kStranger = access::UnixCaller(4713);

class AdminSharingTest : public AdminServiceTest {
 protected:
  // Engines may take an hour, and callers have for ever.
  AdminSharingTest()
      : service_of_patience_(&control_, &engines_, &upgrade_, info_,
                             absl::Hours(1)) {}

  static absl::Time Never() { return absl::InfiniteFuture(); }

  void AwaitWaiting(const std::string& job, size_t count) {
    while (service_of_patience_.described().CountWaiting(job) != count) {
      std::this_thread::yield();
    }
  }

  // Starts a question that the engine holds, has `follow` called by several who
  // come meanwhile and wait for `key`, and ends it.
  template <typename Follow>
  void FollowHeld(FakeEngineService* engine, const std::string& key,
                  const Follow& follow) {
    FakeEngineService::Hold hold;
    engine->HoldFirstAnswer(&hold);
    std::thread leader([&] { follow(0); });
    hold.begun.WaitForNotification();
    std::vector<std::thread> followers;
    for (size_t i = 1; i <= kFollowers; ++i) {
      followers.emplace_back([&follow, i] { follow(i); });
    }
    AwaitWaiting(key, kFollowers);
    hold.may_end.Notify();
    leader.join();
    for (std::thread& follower : followers) follower.join();
    engine->HoldFirstAnswer(nullptr);
  }

  AdminService service_of_patience_;
};

// No answer is of the question that had begun before its call.
TEST_F(AdminSharingTest, CallersOfOneJobShareTheNextQuestion) {
  FakeEngineService& engine = AddJob("a", 1);
  uint64_t steps[kFollowers + 1] = {};
  FollowHeld(&engine, "a", [&](size_t i) {
    const auto job = service_of_patience_.GetJob("a", Operator(), Never());
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->name(), "a");
    steps[i] = job->committed_step();
  });
  EXPECT_EQ(steps[0], 1u);
  for (size_t i = 1; i <= kFollowers; ++i) EXPECT_EQ(steps[i], 2u);
  EXPECT_EQ(engine.asks(), 2);
}

TEST_F(AdminSharingTest, SessionsOfAJobShareItsQuestion) {
  FakeEngineService& engine = AddJob("a", 3);
  FollowHeld(&engine, "a", [&](size_t) {
    const auto sessions =
        service_of_patience_.ListSessions("a", Operator(), Never());
    ASSERT_TRUE(sessions.ok()) << sessions.status();
    EXPECT_EQ(sessions->sessions_size(), 3);
    EXPECT_EQ(sessions->sessions(0).job(), "a");
  });
  EXPECT_EQ(engine.asks(), 2);
}

TEST_F(AdminSharingTest, ListsShareAQuestionToAllEngines) {
  FakeEngineService& engine = AddJob("a", 1);
  FakeEngineService& other = AddJob("b", 2);
  FollowHeld(&engine, "", [&](size_t i) {
    if (i % 2 == 0) {
      EXPECT_EQ(service_of_patience_.ListJobs(Operator(), Never()).jobs_size(),
                2);
    } else {
      EXPECT_EQ(service_of_patience_.ListSessions("", Operator(), Never())
                    ->sessions_size(),
                3);
    }
  });
  EXPECT_EQ(engine.asks(), 2);
  EXPECT_EQ(other.asks(), 2);
}

// An engine that does not answer delays nobody who asks about another job.
TEST_F(AdminSharingTest, JobsDoNotWaitForEachOther) {
  FakeEngineService::Hold hold;
  AddJob("slow", 1).HoldFirstAnswer(&hold);
  FakeEngineService& fast = AddJob("fast", 1);
  std::thread waiting([&] {
    EXPECT_TRUE(service_of_patience_.GetJob("slow", Operator(), Never()).ok());
  });
  hold.begun.WaitForNotification();
  EXPECT_TRUE(service_of_patience_.GetJob("fast", Operator(), Never()).ok());
  EXPECT_EQ(fast.asks(), 1);
  hold.may_end.Notify();
  waiting.join();
}

// One who has no time to wait for others asks alone.
TEST_F(AdminSharingTest, ACallerWithLittleTimeAsksAlone) {
  FakeEngineService& engine = AddJob("a", 1);
  FakeEngineService::Hold hold;
  engine.HoldFirstAnswer(&hold);
  std::thread waiting([&] {
    EXPECT_EQ(
        service_of_patience_.GetJob("a", Operator(), Never())->committed_step(),
        1u);
  });
  hold.begun.WaitForNotification();
  EXPECT_EQ(
      service_of_patience_.GetJob("a", Operator(), Soon())->committed_step(),
      2u);
  hold.may_end.Notify();
  waiting.join();
}

TEST_F(AdminSharingTest, AJobThatIsNotThereIsNotFound) {
  for (const char* const name : {"b", ""}) {
    EXPECT_TRUE(absl::IsNotFound(
        service_of_patience_.GetJob(name, Operator(), Never()).status()));
  }
  EXPECT_TRUE(absl::IsNotFound(
      service_of_patience_.ListSessions("b", Operator(), Never()).status()));
}

TEST_F(AdminSharingTest, AStatusIsShared) {
  FakeEngineService& engine = AddJob("a", 1);
  std::vector<std::thread> callers;
  for (size_t i = 0; i < kFollowers; ++i) {
    callers.emplace_back([this] {
      EXPECT_EQ(service_of_patience_.GetStatus(Operator(), Never()).job_count(),
                1u);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_LE(engine.asks(), static_cast<int>(kFollowers));
  const int before = engine.asks();
  EXPECT_EQ(service_of_patience_.GetStatus(Operator(), Never()).session_count(),
            1u);
  EXPECT_EQ(engine.asks(), before + 1);
}

// A private job costs one who may not look at it as much as none does.
TEST_F(AdminSharingTest, NoEngineIsAskedForOneWhoMayNotLook) {
  FakeEngineService& engine = AddJob("a", 1);
  control_.jobs["a"].access.set_is_private(true);
  EXPECT_EQ(service_of_patience_.GetJob("a", kStranger, Never()).status(),
            supervisor::NoJob("a"));
  EXPECT_EQ(service_of_patience_.ListSessions("a", kStranger, Never()).status(),
            supervisor::NoJob("a"));
  EXPECT_EQ(service_of_patience_.RecoverJob("a", kStranger,
                                            /*to_durable=*/false, Never()),
            supervisor::NoJob("a"));
  EXPECT_EQ(engine.asks(), 0);
}

// While a caller waits, a job ends and another user's private job takes its
// name: the answer of that one's engine is not for the caller.
TEST_F(AdminSharingTest, AnAnswerOfAnothersJobOfTheNameIsNotShown) {
  FakeEngineService& engine = AddJob("a", 1);
  control_.jobs["a"].uid = kStranger.uid;
  engine.set_uid(kStranger.uid + 1);
  FakeEngineService::Hold hold;
  engine.HoldFirstAnswer(&hold);
  absl::Status seen;
  std::thread caller([&] {
    seen = service_of_patience_.GetJob("a", kStranger, Never()).status();
  });
  hold.begun.WaitForNotification();
  {
    absl::MutexLock lock(&control_.mutex);
    control_.jobs["a"].uid = kStranger.uid + 1;
    control_.jobs["a"].access.set_is_private(true);
  }
  hold.may_end.Notify();
  caller.join();
  EXPECT_EQ(seen, supervisor::NoJob("a"));
}

TEST_F(AdminSharingTest, AListHasAnotherUsersJobOfTheNameUnderItsOwnRights) {
  FakeEngineService& engine = AddJob("a", 1);
  control_.jobs["a"].uid = kStranger.uid;
  engine.set_uid(kStranger.uid + 1);
  FakeEngineService::Hold hold;
  engine.HoldFirstAnswer(&hold);
  int shown = -1;
  std::thread caller([&] {
    shown = service_of_patience_.ListJobs(kStranger, Never()).jobs_size();
  });
  hold.begun.WaitForNotification();
  {
    absl::MutexLock lock(&control_.mutex);
    control_.jobs["a"].uid = kStranger.uid + 1;
    control_.jobs["a"].access.set_is_private(true);
  }
  hold.may_end.Notify();
  caller.join();
  EXPECT_EQ(shown, 0);
}

TEST_F(AdminSharingTest, WhatIsSharedIsShownToEachAsItMayLook) {
  FakeEngineService& engine = AddJob("a", 1);
  AddJob("secret", 2);
  control_.jobs["secret"].access.set_is_private(true);
  FollowHeld(&engine, "", [&](size_t i) {
    const bool sees_all = i % 2 == 0;
    const access::Caller caller = sees_all ? Operator() : kStranger;
    if (i % 4 < 2) {
      EXPECT_EQ(service_of_patience_.ListJobs(caller, Never()).jobs_size(),
                sees_all ? 2 : 1);
    } else {
      EXPECT_EQ(service_of_patience_.ListSessions("", caller, Never())
                    ->sessions_size(),
                sees_all ? 3 : 1);
    }
  });
  EXPECT_EQ(engine.asks(), 2);
}

TEST_F(AdminSharingTest, ASharedStatusIsShownToEachAsItMayLook) {
  AddJob("secret", 1);
  control_.jobs["secret"].access.set_is_private(true);
  upgrade_.progress.set_id("b");
  upgrade_.progress.add_problems("job secret: it keeps its engine");
  std::vector<std::thread> callers;
  for (size_t i = 0; i < kFollowers; ++i) {
    callers.emplace_back([this, sees_all = i % 2 == 0] {
      const v1::ServerStatus status = service_of_patience_.GetStatus(
          sees_all ? Operator() : kStranger, Never());
      EXPECT_EQ(status.job_count(), 1u);
      EXPECT_EQ(absl::StrContains(status.upgrade().problems(0), "secret"),
                sees_all);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace optstate::admin
