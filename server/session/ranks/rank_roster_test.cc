#include "server/session/ranks/rank_roster.h"

#include <unistd.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/os/process_stat.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Listener final : public SessionListener {
 public:
  void OnStepDone(uint64_t request_id, const absl::Status& status,
                  const StepOutcome& outcome) override {
    request_id_ = request_id;
    status_ = status;
    step_ = outcome.step;
  }
  void OnNotice(absl::string_view text) override {
    notice_ = std::string(text);
  }

  uint64_t request_id_ = 0;
  absl::Status status_;
  uint64_t step_ = 0;
  std::string notice_;
};

class RankRosterTest : public RoomFixture {
 protected:
  RankRosterTest() { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }

  void Attach(const RankProcess& process) {
    job_.rank_mark(1).client_instance = 70;
    AttachSpec spec;
    spec.rank = 1;
    spec.client_instance = 70;
    spec.process = process;
    ranks_.Attach(spec);
  }
  // Marks rank 1 as attached by an engine that has ended since.
  void LeaveMark(const RankProcess& process) {
    Attach(process);
    ranks_.Reset(2);
  }
};

TEST_F(RankRosterTest, KnowsTheAttachedRanks) {
  EXPECT_EQ(ranks_.size(), 2u);
  EXPECT_EQ(ranks_.AttachedCount(), 0u);
  Attach({});
  EXPECT_EQ(ranks_.state(1), RankState::kAttached);
  EXPECT_EQ(ranks_.state(0), RankState::kAbsent);
  EXPECT_EQ(ranks_.AttachedCount(), 1u);
  EXPECT_TRUE(ranks_.CheckAttached(1).ok());
  EXPECT_THAT(ranks_.CheckAttached(0).message(),
              HasSubstr("rank 0 is not attached"));
  EXPECT_FALSE(ranks_.CheckAttached(2).ok());
}

TEST_F(RankRosterTest, AwaitsRanksOfTheFormerEngine) {
  EXPECT_THAT(ranks_.Awaited(), IsEmpty());
  LeaveMark({.pid = 5, .start_ticks = 6});
  EXPECT_EQ(ranks_.state(1), RankState::kAwaited);
  EXPECT_EQ(ranks_.AwaitedCount(), 1u);
  EXPECT_THAT(ranks_.Awaited(),
              ElementsAre(FormerRank{.rank = 1,
                                     .client_instance = 70,
                                     .process = {.pid = 5, .start_ticks = 6}}));
  Attach({.pid = 5, .start_ticks = 6});
  EXPECT_EQ(ranks_.state(1), RankState::kAttached);
  EXPECT_THAT(ranks_.Awaited(), IsEmpty());
}

TEST_F(RankRosterTest, ARankThatIsAwaitedHasNoSession) {
  Attach({.pid = 5, .start_ticks = 6});
  EXPECT_EQ(ranks_.session(1).spec.client_instance, 70u);
  ranks_.Await(1);
  EXPECT_EQ(ranks_.state(1), RankState::kAwaited);
  EXPECT_EQ(ranks_.session(1).spec.client_instance, 0u);
  EXPECT_EQ(job_.rank_mark(1).attached, 1u);
}

TEST_F(RankRosterTest, ARankThatLeavesIsAwaitedByNoEngine) {
  Attach({.pid = 5, .start_ticks = 6});
  ranks_.Leave(1);
  EXPECT_EQ(ranks_.state(1), RankState::kAbsent);
  EXPECT_EQ(ranks_.session(1).spec.client_instance, 0u);
  ranks_.Reset(2);
  EXPECT_EQ(ranks_.state(1), RankState::kAbsent);
  LeaveMark({.pid = 5, .start_ticks = 6});
  ranks_.Leave(1);
  EXPECT_EQ(ranks_.state(1), RankState::kAbsent);
  EXPECT_EQ(job_.rank_mark(1).attached, 0u);
}

TEST_F(RankRosterTest, OtherTransitionsEndTheProcess) {
  EXPECT_DEATH(ranks_.Await(1), "rank 1 cannot go from absent to awaited");
  EXPECT_DEATH(ranks_.Leave(1), "rank 1 cannot go from absent to absent");
  Attach({});
  EXPECT_DEATH(Attach({}), "rank 1 cannot go from attached to attached");
  ranks_.Await(1);
  EXPECT_DEATH(ranks_.Await(1), "rank 1 cannot go from awaited to awaited");
}

TEST_F(RankRosterTest, ASessionWithoutIdentityIsNotAwaited) {
  AttachSpec spec;
  spec.rank = 1;
  ranks_.Attach(spec);
  EXPECT_DEATH(ranks_.Await(1), "rank 1 cannot go from absent to awaited");
  ranks_.Reset(2);
  EXPECT_EQ(ranks_.state(1), RankState::kAbsent);
  EXPECT_FALSE(ranks_.WasAttachedLast(spec));
}

// Within a step the place of a process that runs is kept.
TEST_F(RankRosterTest, ARunningProcessHoldsItsPlaceWithinAStep) {
  const auto self = os::ReadProcessStat(::getpid());
  ASSERT_TRUE(self.ok());
  LeaveMark({.pid = ::getpid(), .start_ticks = self->start_ticks});
  const RankProcess other = {.pid = 1, .start_ticks = 0};
  EXPECT_FALSE(ranks_.IsHeld(1, other)) << "no step was begun";
  job_.staging_mark(0).step = 1;
  EXPECT_TRUE(ranks_.WasBegun(1));
  EXPECT_FALSE(ranks_.WasBegun(2));
  EXPECT_TRUE(ranks_.IsHeld(1, other));
  EXPECT_FALSE(ranks_.IsHeld(0, other));
  EXPECT_FALSE(ranks_.IsHeld(1, {.pid = ::getpid(), .start_ticks = 1}));
  EXPECT_EQ(ranks_.CheckNoneHeld(other), ranks_.HeldError(1));
  EXPECT_EQ(ranks_.HeldError(1).code(), absl::StatusCode::kAlreadyExists);
  LeaveMark({.pid = ::getpid(), .start_ticks = self->start_ticks + 1});
  EXPECT_FALSE(ranks_.IsHeld(1, other)) << "another process had the pid";
}

TEST_F(RankRosterTest, AnswersThroughTheListener) {
  Listener listener;
  ranks_.session(1).spec.listener = &listener;
  StepOutcome outcome;
  outcome.step = 4;
  ranks_.Answer(1, 9, absl::AbortedError("why"), outcome);
  ranks_.Notify(1, "notice");
  EXPECT_EQ(listener.request_id_, 9u);
  EXPECT_EQ(listener.status_, absl::AbortedError("why"));
  EXPECT_EQ(listener.step_, 4u);
  EXPECT_EQ(listener.notice_, "notice");
}

TEST_F(RankRosterTest, AMarkOfARankThatTheWorldLacksIsCleared) {
  LeaveMark({});
  ASSERT_EQ(job_.rank_mark(1).attached, 1u);
  ranks_.Reset(2);
  EXPECT_EQ(job_.rank_mark(1).attached, 1u);
  ranks_.Reset(1);
  EXPECT_EQ(job_.rank_mark(1).attached, 0u);
}

TEST_F(RankRosterTest, AnAttachedRankIsNotLost) {
  ranks_.losses().Note(1, 3, /*in_open_step=*/true);
  Attach({});
  EXPECT_EQ(ranks_.losses().state(1), LossState::kNone);
  EXPECT_EQ(job_.rank_mark(1).lost_at_step, 0u);
  EXPECT_EQ(job_.rank_mark(1).loss_unacknowledged, 0u);
}

// Notifications of this engine mean nothing to the next one.
TEST_F(RankRosterTest, ANewShapeKnowsTheMarksAlone) {
  ranks_.losses().Note(1, 3, /*in_open_step=*/true);
  ranks_.losses().NoteNotified(1);
  ranks_.Reset(2);
  EXPECT_EQ(ranks_.losses().state(1), LossState::kNotNotified);
}

}  // namespace
}  // namespace optstate::session
