// An engine and its supervisors, one after the other.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/engine/engine_fixture.h"
#include "server/engine/versions.h"

namespace optstate::engine {
namespace {

using EngineSupervisorsTest = EngineTest;

// When the supervisor is killed, sessions notice nothing, and the next
// supervisor finds everything as before.
TEST_F(EngineSupervisorsTest, OutlivesItsSupervisor) {
  auto engine = Start();
  auto first = engine->Connect();
  Begin(first.get(), false);
  TakeStep(first.get(), 1);
  engine->LoseSupervisor();
  TakeStep(first.get(), 2);
  engine->Adopt(job_dir_);
  const v1::EngineEvent::Ready ready = engine->supervisor()->AwaitReady();
  EXPECT_EQ(ready.connections_size(), 1);
  EXPECT_EQ(engine->Describe().committed_step(), 2u);
  TakeStep(first.get(), 3);
  engine->Connect();  // takes new sessions again
  EXPECT_EQ(engine->StopAndWait(), 0);
}

TEST_F(EngineSupervisorsTest, AnotherSupervisorTakesTheFirstOnesPlace) {
  auto engine = Start();
  TestSupervisor second(job_dir_);
  second.Supervise(/*draining=*/true);
  second.AwaitReady();
  // The previous supervisor's connection has ended.
  EXPECT_FALSE(engine->supervisor()->AwaitEvent().event.has_ready());
  engine->Adopt(job_dir_);
  engine->supervisor()->AwaitReady();
  // The job that the second supervisor drained takes steps again.
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  EXPECT_EQ(engine->StopAndWait(), 0);
}

TEST_F(EngineSupervisorsTest, SupervisorThatDrainsRefusesNewSteps) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  TestSupervisor second(job_dir_);
  second.Supervise(/*draining=*/true);
  second.AwaitReady();
  EXPECT_TRUE(absl::IsUnavailable(peer->Call(peer->Push(1)).status));
}

// The next supervisor's configuration differs from the one that the engine was
// started with.
TEST_F(EngineSupervisorsTest, TheNextSupervisorsLimitsCount) {
  auto engine = Start();
  auto peer = engine->Connect();
  TestSupervisor second(job_dir_);
  v1::Limits limits;
  limits.set_job_state_bytes_max(1);
  second.Supervise(/*draining=*/false, limits);
  second.AwaitReady();
  const absl::Status refused = peer->Register();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  engine->Adopt(job_dir_);
  engine->supervisor()->AwaitReady();
  const absl::Status taken = peer->Register();
  EXPECT_TRUE(taken.ok()) << taken;
}

// An older supervisor, such as the one before an upgrade, says nothing of them.
TEST_F(EngineSupervisorsTest, TheNextSupervisorsQuotasCount) {
  // No quota concerns the user of this test.
  ASSERT_EQ(::setenv("OPTSTATE_TEST_ENGINE_UID", "61711", 1), 0);
  auto engine = Start();
  ASSERT_EQ(::unsetenv("OPTSTATE_TEST_ENGINE_UID"), 0);
  auto peer = engine->Connect();
  v1::Quota quota;
  quota.set_user("61711");
  quota.set_state_bytes_max(1);
  TestSupervisor second(job_dir_);
  second.Supervise(/*draining=*/false, {}, /*control_version=*/0, {quota});
  second.AwaitReady();
  const absl::Status refused = peer->Register();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  engine->Adopt(job_dir_);
  engine->supervisor()->AwaitReady();
  const absl::Status again = peer->Register();
  EXPECT_TRUE(absl::IsResourceExhausted(again)) << again;
  quota.set_state_bytes_max(1 << 30);
  TestSupervisor fourth(job_dir_);
  fourth.Supervise(/*draining=*/false, {}, /*control_version=*/0, {quota});
  fourth.AwaitReady();
  const absl::Status taken = peer->Register();
  EXPECT_TRUE(taken.ok()) << taken;
}

// The job is over while there is no supervisor.
TEST_F(EngineSupervisorsTest, TheNextSupervisorHearsThatTheJobIsOver) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), true);
  engine->LoseSupervisor();
  peer.reset();
  engine->Adopt(job_dir_);
  engine->supervisor()->AwaitReady();
  EXPECT_TRUE(engine->supervisor()->AwaitOther().event.has_finished());
}

// The supervisor dies before the job is opened.
TEST_F(EngineSupervisorsTest, OutlivesASupervisorThatDiesAtItsStart) {
  TestEngine engine(job_dir_);
  engine.supervisor()->Supervise();
  engine.supervisor()->Keep(3, "left");
  engine.LoseSupervisor();
  engine.Adopt(job_dir_);
  // The engine has received all messages of the first supervisor: the gradients
  // kept are dropped, as no step needs them.
  const TestEvent dropped = engine.supervisor()->AwaitEvent();
  ASSERT_TRUE(dropped.event.has_drop_gradients())
      << dropped.event.ShortDebugString();
  EXPECT_EQ(dropped.event.drop_gradients().rank(), 3u);
  EXPECT_TRUE(engine.supervisor()->AwaitEvent().event.has_ready());
}

// Between steps the gradients kept of the previous engine are not needed.
TEST_F(EngineSupervisorsTest,
       GradientsThatWereKeptAreDroppedWhenNoStepNeedsThem) {
  TestEngine engine(job_dir_);
  TestSupervisor& first = *engine.supervisor();
  first.Supervise();
  for (uint32_t rank = 0; rank < 1024; ++rank) {
    // Requests are sent as fast as the engine takes them.
    v1::SupervisorRequest request;
    request.mutable_kept_gradients()->set_rank(rank);
    request.mutable_kept_gradients()->set_client_instance(rank + 50);
    first.SendWhenItCan(request, MemoryFile(absl::StrCat(rank)).get());
  }
  first.StartJob();
  std::set<uint32_t> dropped;
  bool ready = false;
  while (!ready || dropped.size() < 1024) {
    const TestEvent event = first.AwaitEvent();
    if (event.event.has_drop_gradients()) {
      dropped.insert(event.event.drop_gradients().rank());
    } else {
      ASSERT_TRUE(event.event.has_ready()) << event.event.ShortDebugString();
      ready = true;
    }
  }
  engine.Adopt(job_dir_);
  EXPECT_TRUE(engine.supervisor()->AwaitEvent().event.has_ready());
}

// A rank's gradients are kept as long as it is attached.
TEST_F(EngineSupervisorsTest,
       GradientsOfAttachedRanksAreToldToEverySupervisor) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  for (int supervisors = 0; supervisors < 2; ++supervisors) {
    engine->LoseSupervisor();
    engine->Adopt(job_dir_);
    engine->supervisor()->AwaitReady();
    ASSERT_EQ(engine->supervisor()->kept().size(), 1u);
    EXPECT_TRUE(engine->supervisor()->kept().begin()->second.ok());
  }
}

void Leave(transport::ShmTestPeer* peer) {
  v1::SessionRequest request;
  request.set_request_id(1000);
  request.mutable_detach();
  ASSERT_TRUE(peer->Send(request).ok());
  ASSERT_TRUE(peer->Receive().ok());
}

// Loses rank 0, and returns once the engine knows.
void LoseRank(TestEngine* engine,
              std::unique_ptr<transport::ShmTestPeer> peer) {
  ASSERT_EQ(engine->Describe().session_count(), 1u);
  peer.reset();
  while (engine->Describe().session_count() != 0) {
  }
}

// Ends the engine and returns the losses that it has told.
size_t CountLosses(TestEngine* engine) {
  engine->supervisor()->Stop();
  size_t losses = 0;
  while (true) {
    const TestEvent next = engine->supervisor()->AwaitEvent();
    if (next.event.event_case() == v1::EngineEvent::EVENT_NOT_SET) break;
    if (next.event.has_rank_lost()) ++losses;
  }
  EXPECT_EQ(engine->Wait(), 0);
  return losses;
}

TEST_F(EngineSupervisorsTest, ALostRankIsTold) {
  auto engine = Start();
  engine->Adopt(job_dir_, kControlVersion);
  EXPECT_EQ(engine->supervisor()->AwaitReady().control_version(),
            kControlVersion);
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  peer.reset();
  const TestEvent lost = engine->supervisor()->AwaitOther();
  ASSERT_TRUE(lost.event.has_rank_lost()) << lost.event.ShortDebugString();
  EXPECT_EQ(lost.event.rank_lost().rank(), 0u);
  EXPECT_EQ(lost.event.rank_lost().committed_step(), 1u);
  EXPECT_NE(lost.event.rank_lost().reason(), "");
  EXPECT_EQ(CountLosses(engine.get()), 0u);
}

// A rank that detaches is not lost, nor is one whose engine ends.
TEST_F(EngineSupervisorsTest, ARankThatLeavesIsNotLost) {
  auto engine = Start();
  engine->Adopt(job_dir_, kControlVersion);
  engine->supervisor()->AwaitReady();
  auto left = engine->Connect();
  Begin(left.get(), false);
  Leave(left.get());
  left.reset();
  auto stays = engine->Connect();
  Begin(stays.get(), false);
  EXPECT_EQ(CountLosses(engine.get()), 0u);
}

TEST_F(EngineSupervisorsTest, RanksThatGoWhileTheJobDrainsAreNotLost) {
  auto engine = Start();
  engine->Adopt(job_dir_, kControlVersion);
  engine->supervisor()->AwaitReady();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  engine->supervisor()->Drain(true);
  // The request before it was obeyed when the push is refused.
  while (peer->Call(peer->Push(1)).status.ok()) {
    shm::Submission undo = {};
    undo.op = static_cast<uint16_t>(shm::Op::kAbort);
    undo.step = 1;
    ASSERT_TRUE(peer->Call(undo).status.ok());
  }
  LoseRank(engine.get(), std::move(peer));
  EXPECT_EQ(CountLosses(engine.get()), 0u);
}

// The build before takes an engine of its own version alone, and does not know
// of lost ranks.
TEST_F(EngineSupervisorsTest, ASupervisorOfTheBuildBeforeIsToldNoLoss) {
  auto engine = Start();
  engine->Adopt(job_dir_, kControlVersionMin);
  EXPECT_EQ(engine->supervisor()->AwaitReady().control_version(),
            kControlVersionMin);
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  LoseRank(engine.get(), std::move(peer));
  EXPECT_EQ(CountLosses(engine.get()), 0u);
}

// A supervisor that comes later is not told: ranks whose connections go with
// their supervisor are back by then.
TEST_F(EngineSupervisorsTest, ALossWithoutASupervisorIsNotToldLater) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  engine->LoseSupervisor();
  peer.reset();
  engine->Adopt(job_dir_);  // of the build before: it can ask
  engine->supervisor()->AwaitReady();
  while (engine->Describe().session_count() != 0) {
  }
  engine->Adopt(job_dir_, kControlVersion);
  engine->supervisor()->AwaitReady();
  EXPECT_EQ(CountLosses(engine.get()), 0u);
}

TEST_F(EngineSupervisorsTest, APrivateEngineEndsWithItsSupervisor) {
  TestEngine engine(job_dir_, /*is_private=*/true);
  engine.LoseSupervisor();  // before its first message, perhaps before exec
  EXPECT_EQ(engine.Wait(), 0);
  TestEngine another(job_dir_, /*is_private=*/true);
  another.supervisor()->Supervise();
  another.supervisor()->StartJob();
  another.supervisor()->AwaitReady();
  another.LoseSupervisor();
  EXPECT_EQ(another.Wait(), 0);
}

}  // namespace
}  // namespace optstate::engine
