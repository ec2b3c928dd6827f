// Tests of processes that are stopped, and go on. Timeouts are a fraction of a
// second: a minute with longer ones is the same path. A call whose process is
// not stopped is made again when it is not answered in time, so that a slow
// machine changes nothing: what is asserted is what is answered, never when.

#include <signal.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "gtest/gtest.h"
#include "tests/crash/poll_until.h"
#include "tests/faults/fault_fixture.h"
#include "tests/faults/process_state.h"

namespace optstate::faults {
namespace {

using client::Session;

constexpr absl::Duration kShort = absl::Milliseconds(300);

class StoppedProcessTest : public WireFaultTest {
 protected:
  void SetUp() override {
    WireFaultTest::SetUp();
    StartDaemon();
  }

  void Stop(const Process& process) {
    process.Signal(SIGSTOP);
    const absl::Status stopped =
        crash::PollUntil("the stop", [&] { return IsStopped(process.pid()); });
    ASSERT_TRUE(stopped.ok()) << stopped;
  }

  // Repeats the call until it is answered, in however many times of the step
  // timeout.
  void Insist(const std::string& what,
              const std::function<absl::Status()>& call) {
    absl::Status status;
    const absl::Status answered = crash::PollUntil(what, [&] {
      status = call();
      return !absl::IsDeadlineExceeded(status);
    });
    ASSERT_TRUE(answered.ok()) << answered;
    ASSERT_TRUE(status.ok()) << what << ": " << status;
  }

  void InsistOnPush(Session& session, const StepScript::Step& step) {
    Insist("the push", [&] {
      const absl::Status pushed = StepScript::Push(session, step);
      return pushed.ok() ? session.Flush() : pushed;
    });
  }

  void CommitUntilAnswered(Session& session,
                           const client::CommitOptions& commit) {
    absl::StatusOr<client::Outcome> outcome;
    const absl::Status answered = crash::PollUntil("the step", [&] {
      outcome = session.Commit(commit);
      return !absl::IsDeadlineExceeded(outcome.status());
    });
    ASSERT_TRUE(answered.ok()) << answered;
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->step, commit.step);
    // The outcome is recorded once: a repeated request is told the same.
    const auto again = session.Commit(commit);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->step, commit.step);
    EXPECT_EQ(again->gradient_norm, outcome->gradient_norm);
    EXPECT_EQ(session.committed_step(), commit.step);
  }
};

TEST_P(StoppedProcessTest, EngineForLongerThanTheStepTimeout) {
  client::SessionOptions options = Options();
  options.step_timeout = kShort;
  options.connect_timeout = absl::Seconds(1);
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  Insist("the load", [&] { return Script().Load(*session); });
  const StepScript::Step first = Script().Make(1);
  InsistOnPush(*session, first);
  CommitUntilAnswered(*session, first.commit);
  const StepScript::Step step = Script().Make(2);
  InsistOnPush(*session, step);
  const Process process(engine());
  Stop(process);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(session->Commit(step.commit).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  process.Signal(SIGCONT);
  CommitUntilAnswered(*session, step.commit);
  EXPECT_EQ(engine(), process.pid());
  ExpectUndisturbed(*session, 2);
}

TEST_P(StoppedProcessTest, EngineWhileItsRankWaits) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  const StepScript::Step step = Script().Make(1);
  ASSERT_TRUE(StepScript::Push(*session, step).ok());
  ASSERT_TRUE(session->Flush().ok());
  const Process process(engine());
  Stop(process);
  ASSERT_TRUE(session->CommitStart(step.commit).ok());
  process.Signal(SIGCONT);
  const auto outcome = session->CommitWait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ExpectUndisturbed(*session, 1);
}

TEST_P(StoppedProcessTest, SupervisorWhileRanksStep) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  Stop(daemon_->process());
  RunSteps(*session, 1, 3);
  client::SessionOptions newcomer = Options();
  newcomer.job = "newcomer";
  newcomer.connect_timeout = kShort;
  EXPECT_EQ(Session::Open(newcomer).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  // The connection waits in the backlog, and is served in its turn.
  newcomer.connect_timeout = absl::Minutes(1);
  std::thread waiting([&] { EXPECT_NE(Open(newcomer), nullptr); });
  daemon_->process().Signal(SIGCONT);
  waiting.join();
  RunSteps(*session, 4, 4);
  ExpectUndisturbed(*session, 4);
}

TEST_P(StoppedProcessTest, RankWhileAnotherWaits) {
  client::SessionOptions options = Options(0, 2);
  options.step_timeout = kShort;
  const auto first = Open(options);
  const auto second = StartRank(1, 2);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  ASSERT_TRUE(second->Send("load").ok());
  Insist("the load", [&] { return Script().Load(*first); });
  ASSERT_TRUE(second->Receive().ok());
  ASSERT_TRUE(second->Do("push 1").ok());
  Stop(second->process());
  const StepScript::Step step = Script().Make(1);
  InsistOnPush(*first, step);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(first->Commit(step.commit).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  second->process().Signal(SIGCONT);
  ASSERT_TRUE(second->Send("commit 1").ok());
  CommitUntilAnswered(*first, step.commit);
  const auto answer = second->Receive();
  ASSERT_TRUE(answer.ok()) << answer.status();
  ExpectUndisturbed(*first, 1);
}

INSTANTIATE_TEST_SUITE_P(Wires, StoppedProcessTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate::faults
