#include "server/session/drain_gate.h"

#include <thread>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

class DrainGateTest : public RoomFixture {
 protected:
  void OpenStepOfRank0() {
    ranks_.Attach(AttachSpec());
    step_.open_step.NoteStaged(0, 0, 0);
  }
  absl::Status PauseNow(absl::Duration lease = absl::Seconds(5)) {
    absl::MutexLock lock(&job_.lock.mu);
    return gate_.Pause(absl::InfinitePast(), lease);
  }
  absl::Status AwaitDrainedNow() {
    absl::MutexLock lock(&job_.lock.mu);
    return gate_.AwaitDrained(absl::InfinitePast());
  }

  DrainGate gate_{&job_, &ranks_, &step_, &load_};
};

TEST_F(DrainGateTest, AJobWithoutAStepIsDrainedAtOnce) {
  EXPECT_FALSE(AwaitDrainedNow().ok()) << "it does not drain";
  gate_.BeginDrain();
  EXPECT_TRUE(gate_.draining());
  EXPECT_TRUE(AwaitDrainedNow().ok());
  gate_.Resume();
  EXPECT_FALSE(gate_.draining());
}

TEST_F(DrainGateTest, AnOpenStepIsNamed) {
  OpenStepOfRank0();
  gate_.BeginDrain();
  const absl::Status status = AwaitDrainedNow();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("step 1: ranks 0, 1 have not"));
  // Gradients of ranks that are away open no step.
  ranks_.Leave(0);
  EXPECT_TRUE(AwaitDrainedNow().ok());
}

TEST_F(DrainGateTest, APauseNeedsAMomentWithNothingUnderWay) {
  OpenStepOfRank0();
  EXPECT_EQ(PauseNow().code(), absl::StatusCode::kDeadlineExceeded);
  step_.open_step.DropAll();
  load_.round.Begin(0);
  EXPECT_FALSE(PauseNow().ok());
  load_.round.Clear();
  EXPECT_TRUE(PauseNow().ok());
  EXPECT_TRUE(gate_.paused());
}

TEST_F(DrainGateTest, APauseEndsWithItsLease) {
  ASSERT_TRUE(PauseNow(absl::Seconds(5)).ok());
  now_ += absl::Seconds(4);
  EXPECT_TRUE(gate_.paused());
  now_ += absl::Seconds(1);
  EXPECT_FALSE(gate_.paused());
  absl::MutexLock lock(&job_.lock.mu);
  gate_.AwaitPauseEnd();  // returns
}

TEST_F(DrainGateTest, AStoppedJobIsPausedForEver) {
  gate_.Stop();
  now_ += absl::Hours(1000 * 24 * 365);
  EXPECT_TRUE(gate_.paused());
}

// A pass is a part of a step or a load, whatever is left of these.
TEST_F(DrainGateTest, NothingIsDrainedOrPausedDuringAPass) {
  gate_.BeginDrain();
  absl::Notification begun;
  absl::Notification may_end;
  std::thread step([&] {
    JobCall call(&job_.lock);
    EXPECT_TRUE(job_.MakePass([&] {
                      begun.Notify();
                      may_end.WaitForNotification();
                      return absl::OkStatus();
                    })
                    .ok());
  });
  begun.WaitForNotification();
  EXPECT_FALSE(AwaitDrainedNow().ok());
  EXPECT_FALSE(PauseNow().ok());
  may_end.Notify();
  step.join();
  EXPECT_TRUE(AwaitDrainedNow().ok());
  EXPECT_TRUE(PauseNow().ok());
}

}  // namespace
}  // namespace optstate::session
