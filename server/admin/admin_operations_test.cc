// Calls of the Admin service that change something.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/admin/admin_service_fixture.h"

namespace optstate::admin {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using AdminOperationsTest = AdminServiceTest;

const access::Caller kSelf = access::UnixCaller(::geteuid());
// A user that is certainly neither root nor the one of this test.
const access::Caller kOther = access::UnixCaller(4711);

TEST_F(AdminOperationsTest, DrainChecksItsTimeout) {
  v1::DrainRequest request;
  for (const auto& [seconds, nanos] : {std::pair<int64_t, int>{-1, 0},
                                       {0, -1},
                                       {0, 1'000'000'000},
                                       {1LL << 60, 0}}) {
    request.mutable_timeout()->set_seconds(seconds);
    request.mutable_timeout()->set_nanos(nanos);
    const absl::Status refused =
        service_->Drain(request, kSelf, Soon()).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  }
  EXPECT_FALSE(control_.is_draining);
}

TEST_F(AdminOperationsTest, DeleteSparesAJobWithRanks) {
  AddJob("busy", 1);
  AddJob("idle", 0);
  const absl::Status busy = service_->DeleteJob("busy", false, kSelf, Soon());
  EXPECT_TRUE(absl::IsFailedPrecondition(busy)) << busy;
  EXPECT_THAT(control_.calls, ElementsAre("hold busy", "release busy"));
  control_.calls.clear();
  EXPECT_TRUE(service_->DeleteJob("idle", false, kSelf, Soon()).ok());
  EXPECT_TRUE(service_->DeleteJob("busy", true, kSelf, Soon()).ok());
  EXPECT_THAT(control_.calls, ElementsAre("hold idle", "delete idle",
                                          "hold busy", "delete busy"));
}

TEST_F(AdminOperationsTest, AWatchedDeletionTellsItsEnd) {
  AddJob("busy", 1);
  AddJob("idle", 0);
  v1::DeleteProgress last;
  int messages = 0;
  const auto remove = [&](const char* job) {
    return service_->DeleteJobWatched(job, /*force=*/false, kSelf, Soon(),
                                      [&](const v1::DeleteProgress& progress) {
                                        last = progress;
                                        return ++messages < 3;
                                      });
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(remove("busy")));
  EXPECT_EQ(messages, 0);
  EXPECT_THAT(control_.calls, ElementsAre("hold busy", "release busy"));
  const absl::Status deleted = remove("idle");
  EXPECT_TRUE(deleted.ok()) << deleted;
  EXPECT_TRUE(last.done());
  EXPECT_FALSE(last.awaits_engine());
  EXPECT_EQ(last.bytes(), 10u);
  EXPECT_EQ(last.bytes_total(), 10u);
  AddJob("damaged", 0);
  control_.delete_status = absl::DataLossError("the disk");
  EXPECT_EQ(remove("damaged"), control_.delete_status);
  // One that goes on is told until the caller takes no more of it.
  AddJob("long", 0);
  control_.deletion_goes_on = true;
  messages = 0;
  EXPECT_TRUE(absl::IsCancelled(remove("long")));
  EXPECT_EQ(messages, 3);
  EXPECT_FALSE(last.done());
  EXPECT_TRUE(last.awaits_engine());
}

TEST_F(AdminOperationsTest, DeleteOfAnEngineThatDoesNotAnswerNeedsForce) {
  AddJob("hanging", 0, /*hangs=*/true);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      service_->DeleteJob("hanging", false, kSelf, Soon())));
  control_.jobs["hanging"].engine_pid = 0;
  engines_.Erase("hanging");
  EXPECT_TRUE(service_->DeleteJob("hanging", false, kSelf, Soon()).ok());
}

TEST_F(AdminOperationsTest, DeleteChecksNameAndUser) {
  AddJob("a", 0);
  EXPECT_TRUE(absl::IsInvalidArgument(
      service_->DeleteJob("../a", false, kSelf, Soon())));
  EXPECT_TRUE(absl::IsNotFound(service_->DeleteJob("b", false, kSelf, Soon())));
  EXPECT_TRUE(
      absl::IsPermissionDenied(service_->DeleteJob("a", true, kOther, Soon())));
}

// The engine is named by the pid that it reports: the supervisor's pid may be
// the next engine's.
TEST_F(AdminOperationsTest, RecoverNamesTheEngineThatCallsItsJobFailed) {
  AddJob("ready", 1);
  AddJob("failed", 1).set_phase(v1::JOB_PHASE_FAILED);
  AddJob("hanging", 1, /*hangs=*/true);
  AddJob("dead", 1);
  engines_.Erase("dead");
  for (const char* job : {"ready", "failed", "hanging", "dead"}) {
    EXPECT_TRUE(
        service_->RecoverJob(job, kSelf, /*to_durable=*/false, Soon()).ok());
  }
  EXPECT_THAT(control_.calls,
              ElementsAre("recover ready 0", "recover failed 18",
                          "recover hanging 0", "recover dead 0"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      service_->RecoverJob("../a", kSelf, /*to_durable=*/false, Soon())));
}

// A job that is well goes back to its durable step, but not under its ranks.
TEST_F(AdminOperationsTest, RecoverToDurableSparesAJobWithRanks) {
  AddJob("busy", 1).set_durable_step(3);
  AddJob("idle", 0).set_durable_step(3);
  AddJob("failed", 1).set_phase(v1::JOB_PHASE_FAILED);
  AddJob("dead", 0);
  engines_.Erase("dead");
  const absl::Status busy =
      service_->RecoverJob("busy", kSelf, /*to_durable=*/true, Soon());
  EXPECT_TRUE(absl::IsFailedPrecondition(busy)) << busy;
  EXPECT_THAT(std::string(busy.message()),
              HasSubstr("1 ranks attached: end them first"));
  EXPECT_THAT(control_.calls, ElementsAre("hold busy", "release busy"));
  control_.calls.clear();
  for (const char* job : {"idle", "failed", "dead"}) {
    EXPECT_TRUE(
        service_->RecoverJob(job, kSelf, /*to_durable=*/true, Soon()).ok());
  }
  EXPECT_THAT(control_.calls,
              ElementsAre("hold idle", "recover idle 18", "release idle",
                          "recover failed 18", "recover dead 0"));
}

// Its engine would be killed, and find nothing to begin with.
TEST_F(AdminOperationsTest, RecoverToDurableSparesAWellJobWithoutSuchAStep) {
  AddJob("a", 0);
  const absl::Status refused =
      service_->RecoverJob("a", kSelf, /*to_durable=*/true, Soon());
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("job \"a\" has no durable step to go back to"));
  EXPECT_TRUE(control_.calls.empty());
}

TEST_F(AdminOperationsTest, SetReachesTheEngineOfWhoMayChangeTheJob) {
  AddJob("a", 1);
  v1::SetJobRequest request;
  request.set_name("a");
  request.set_host_budget_bytes(4096);
  const auto set = service_->SetJob(request, kSelf, Soon());
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->storage().host_budget_bytes(), 4096u);
  control_.jobs["a"].uid = 4711;
  EXPECT_TRUE(service_->SetJob(request, kOther, Soon()).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(
      service_->SetJob(request, access::UnixCaller(4712), Soon()).status()));
  request.set_name("b");
  EXPECT_TRUE(
      absl::IsNotFound(service_->SetJob(request, kOther, Soon()).status()));
  request.set_name("../a");
  EXPECT_TRUE(absl::IsInvalidArgument(
      service_->SetJob(request, kOther, Soon()).status()));
}

// A job is deleted, and another user's gets its name, while a call is on its
// way to the engine.
TEST_F(AdminOperationsTest, NoCallReachesTheEngineOfTheNextJobOfTheName) {
  v1::SetJobRequest set;
  set.set_name("a");
  v1::TraceJobRequest trace;
  trace.set_name("a");
  v1::ListParametersRequest list;
  list.set_job("a");
  const std::function<absl::Status()> calls[] = {
      [&] { return service_->SetJob(set, kSelf, Soon()).status(); },
      [&] {
        return service_->VerifyJob(
            "a", kSelf, nullptr,
            [](const v1::VerifyJobProgress&) { return true; });
      },
      [&] {
        return service_->TraceJob(trace, kSelf, nullptr,
                                  [](const v1::TraceChunk&) { return true; });
      },
      [&] { return service_->ListParameters(list, kSelf, Soon()).status(); }};
  for (const auto& call : calls) {
    AddJob("a", 1);
    EXPECT_TRUE(call().ok()) << call();
    FakeEngineService* next = nullptr;
    // The engine ends, and the job with it. An operator may change both.
    control_.before_find = [&] { next = &StartEngine("a", 1); };
    const absl::Status late = call();
    EXPECT_TRUE(absl::IsUnavailable(late)) << late;
    ASSERT_NE(next, nullptr);
    EXPECT_EQ(next->orders(), 0);
  }
}

TEST_F(AdminOperationsTest, SetSaysWhichEngineDoesNotAnswerOrIsTooOld) {
  AddJob("old", 2);
  AddJob("dead", 1, /*hangs=*/false, /*dies=*/true);
  v1::SetJobRequest request;
  request.set_name("old");
  const absl::Status old = service_->SetJob(request, kSelf, Soon()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(old)) << old;
  EXPECT_THAT(std::string(old.message()), HasSubstr("optctl upgrade"));
  request.set_name("dead");
  const absl::Status dead = service_->SetJob(request, kSelf, Soon()).status();
  EXPECT_TRUE(absl::IsUnavailable(dead)) << dead;
  EXPECT_THAT(std::string(dead.message()), HasSubstr("engine of job \"dead\""));
}

TEST_F(AdminOperationsTest, DrainReachesEveryEngineAndNamesWhoIsLate) {
  FakeEngineService& quick = AddJob("quick", 1);
  AddJob("slow", 2);
  v1::DrainRequest request;
  const absl::Status drained = service_->Drain(request, kSelf, Soon()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(drained)) << drained;
  EXPECT_THAT(std::string(drained.message()),
              testing::AllOf(HasSubstr("slow"), HasSubstr("step 3 is open"),
                             HasSubstr("draining stays in force"),
                             HasSubstr("`optctl drain --resume`")));
  EXPECT_TRUE(control_.is_draining);
  EXPECT_EQ(quick.drains(), 1);
  request.set_resume(true);
  const auto resumed = service_->Drain(request, kSelf, Soon());
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(resumed->was_draining());
  EXPECT_FALSE(control_.is_draining);
  EXPECT_FALSE(service_->Drain(request, kSelf, Soon())->was_draining());
}

// The request is in force whether or not the engine confirms it.
TEST_F(AdminOperationsTest, AStoppedEngineDoesNotUndoWhatItIsTold) {
  AddJob("stopped", 1, /*hangs=*/true);
  const absl::Status drained = service_->Drain({}, kSelf, Soon()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(drained)) << drained;
  EXPECT_THAT(std::string(drained.message()),
              testing::AllOf(HasSubstr("draining stays in force"),
                             HasSubstr("engine of job \"stopped\"")));
  EXPECT_TRUE(control_.is_draining);
  v1::DrainRequest resume;
  resume.set_resume(true);
  const absl::Status resumed = service_->Drain(resume, kSelf, Soon()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(resumed)) << resumed;
  EXPECT_THAT(std::string(resumed.message()),
              testing::AllOf(HasSubstr("draining has ended"),
                             HasSubstr("engine of job \"stopped\"")));
  EXPECT_FALSE(control_.is_draining);
}

// An engine dies while it finishes its step; the next one finishes it.
TEST_F(AdminOperationsTest, DrainAsksTheEngineThatComesNext) {
  AddJob("over", 0, /*hangs=*/false, /*dies=*/true);
  AddJob("dying", 0, /*hangs=*/false, /*dies=*/true);
  AddJob("starting", 1);
  engines_.Lose("starting");
  absl::Status drained = absl::UnknownError("");
  std::thread drain(
      [&] { drained = service_->Drain({}, kSelf, Soon()).status(); });
  for (const char* job : {"over", "dying"}) fakes_[job]->AwaitQuestion();
  engines_.Erase("over");  // its last rank has left
  engines_.Lose("dying");
  FakeEngineService& next = AddJob("dying", 1);
  FakeEngineService& started = AddJob("starting", 1);
  drain.join();
  EXPECT_TRUE(drained.ok()) << drained;
  EXPECT_EQ(next.drains(), 1);
  EXPECT_EQ(started.drains(), 1);
  // A resume does not wait for an engine to take steps.
  engines_.Lose("dying");
  v1::DrainRequest resume;
  resume.set_resume(true);
  EXPECT_TRUE(service_->Drain(resume, kSelf, Soon()).ok());
  // No next engine comes in time.
  const absl::Status late =
      service_->Drain({}, kSelf, absl::InfinitePast()).status();
  EXPECT_TRUE(absl::IsUnavailable(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("dying"));
}

// A pause ends by itself, so paused engines are asked again while another one
// is late.
TEST_F(AdminOperationsTest, AllPauseUntilTheLastOneDoes) {
  FakeEngineService& quick = AddJob("quick", 1);
  FakeEngineService& late = AddJob("late", 2);
  AddJob("dying", 1, /*hangs=*/false, /*dies=*/true);
  AddJob("starting", 1);
  engines_.Lose("starting");
  const absl::Status paused = engines_.PauseAll(Soon());
  EXPECT_TRUE(paused.ok()) << paused;
  // An engine whose answer came too late is asked once more.
  EXPECT_GE(late.pauses(), 3);
  EXPECT_GE(quick.pauses(), 3);
  AddJob("late", 2);
  const absl::Status not_in_time = engines_.PauseAll(absl::InfinitePast());
  EXPECT_TRUE(absl::IsDeadlineExceeded(not_in_time)) << not_in_time;
}

TEST_F(AdminOperationsTest, UpgradeShowsItsProgress) {
  EXPECT_FALSE(
      service_->GetStatus(Operator(), absl::InfiniteFuture()).has_upgrade());
  EXPECT_TRUE(service_->Upgrade("b", kSelf).ok());
  EXPECT_EQ(
      service_->GetStatus(Operator(), absl::InfiniteFuture()).upgrade().id(),
      "b");
}

}  // namespace
}  // namespace optstate::admin
