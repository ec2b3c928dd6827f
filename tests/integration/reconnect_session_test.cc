// Tests what becomes of a session that ends, is replaced or is interrupted
// while the engine is away.

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/crash/poll_until.h"
#include "tests/integration/reconnect_fixture.h"

namespace optstate {
namespace {

using client::Session;
using testing::HasSubstr;

// The next engine is not left to wait for the session.
TEST_P(ReconnectTest, ClosedWhileTheEngineIsAway) {
  client::SessionOptions options = Options();
  options.ephemeral = true;
  for (const bool in_a_step : {false, true}) {
    auto session = Open(options);
    ASSERT_NE(session, nullptr);
    ASSERT_TRUE(Script().Load(*session).ok());
    RunSteps(*session, 1, 1);
    const StepScript::Step step = Script().Make(2);
    if (in_a_step) {
      ASSERT_TRUE(StepScript::Push(*session, step).ok());
      ASSERT_TRUE(session->CommitStart(step.commit).ok());
    }
    ASSERT_TRUE(daemon_->KillEngine("job").ok());
    session.reset();
    const absl::Status gone = crash::PollUntil("the end of the job", [&] {
      return absl::IsNotFound(daemon_->GetJob("job").status());
    });
    ASSERT_TRUE(gone.ok()) << gone;
  }
}

// A session that closes late does not change what others have made of the job.
TEST_P(ReconnectTest, ClosedAfterAnotherOneCameInItsPlace) {
  client::SessionOptions options = Options();
  options.ephemeral = true;
  auto session = Open(options);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  ASSERT_TRUE(daemon_->KillEngine("job").ok());
  const auto later = Open(Options());
  ASSERT_NE(later, nullptr);
  RunSteps(*later, 1, 1);
  later->Close();
  session.reset();
  const auto last = Open(Options());
  ASSERT_NE(last, nullptr);
  ExpectUndisturbed(*last, 1);
}

// Another session may come in a session's place between two steps: what that
// one did is not the answer to what this one asks for later.
TEST_P(ReconnectTest, NotBackInThePlaceOfAnother) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  RunSteps(*session, 1, 1);
  ASSERT_TRUE(daemon_->KillEngine("job").ok());
  const auto later = Open(Options());
  ASSERT_NE(later, nullptr);
  RunSteps(*later, 2, 2);
  later->Close();
  const absl::Status refused = Script().Run(*session, 2).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              testing::HasSubstr("another session's"));
  session->Close();
  const auto last = Open(Options());
  ASSERT_NE(last, nullptr);
  ExpectUndisturbed(*last, 2);
}

TEST_P(ReconnectTest, AForkNeitherSpeaksNorWrites) {
  client::SessionOptions options = Options();
  options.layout = UniformLayout(2, 50);
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(LoadConstant(*session, 1).ok());
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    char pushed;
    bool refused = ::read(pipe_fds[0], &pushed, 1) == 1;
    const std::vector<float> others(50, 1000);
    const uint32_t parameter = 0;
    const void* const gradient = others.data();
    for (const absl::Status& status :
         {session->PushGradients(1, 0, {&parameter, 1}, {&gradient, 1}),
          session->Push(1, 0, 0, 2), session->Abort(1),
          session->Commit(CommitOf(*session, 1)).status()}) {
      refused = refused && absl::IsFailedPrecondition(status);
    }
    // Not by exit: ThreadSanitizer would miss the parent's threads here.
    ::syscall(SYS_exit_group, refused ? 0 : 1);
  }
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  ASSERT_TRUE(session->Flush().ok());
  ASSERT_EQ(::write(pipe_fds[1], "p", 1), 1);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ::close(pipe_fds[0]);
  ::close(pipe_fds[1]);
  const auto outcome = session->Commit(CommitOf(*session, 1));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_DOUBLE_EQ(outcome->gradient_norm, 10);
}

// After such a push it is not known which gradients have arrived.
TEST_P(ReconnectTest, AfterAPushWithoutAnAnswerTheStepBeginsAnew) {
  client::SessionOptions options = Options();
  options.layout = UniformLayout(2, 50);
  options.step_timeout = absl::Milliseconds(300);
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(LoadConstant(*session, 1).ok());
  const auto push = [&](float value, uint32_t count) {
    const std::vector<float> values(50, value);
    const std::vector<uint32_t> parameters = {0, 1};
    const std::vector<const void*> gradients(2, values.data());
    return session->PushGradients(1, 0, absl::MakeSpan(parameters).first(count),
                                  absl::MakeSpan(gradients).first(count));
  };
  const auto engine =
      static_cast<pid_t>(daemon_->GetJob("job").value().engine_pid());
  ASSERT_EQ(::kill(engine, SIGSTOP), 0);
  const absl::Status stopped = crash::PollUntil("the engine to stop", [&] {
    std::string pid, name, state;
    std::ifstream(absl::StrCat("/proc/", engine, "/stat")) >> pid >> name >>
        state;
    return state == "T";
  });
  ASSERT_TRUE(stopped.ok()) << stopped;
  ASSERT_TRUE(push(7, 1).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Flush()));
  ASSERT_EQ(::kill(engine, SIGCONT), 0);
  // Nothing of the step is left, so it is not taken without what was pushed.
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      session->Commit(CommitOf(*session, 1)).status()));
  ASSERT_TRUE(push(1, 2).ok());
  const auto outcome = session->Commit(CommitOf(*session, 1));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_DOUBLE_EQ(outcome->gradient_norm, 10);
}

// The interrupted end is of the micro-step before, which ended with its step.
TEST_P(ReconnectTest, AnInterruptedEndIsNotTakenForTheNext) {
  std::atomic<bool> interrupted = false;
  client::SessionOptions options = Options(0, 2);
  options.layout = UniformLayout(1, 50);
  options.partition = PartitionMode::kReplicated;
  options.accumulate = true;
  options.interrupted = [&] { return interrupted.load(); };
  const auto first = Open(options);
  options.rank = 1;
  options.interrupted = nullptr;
  const auto second = Open(options);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  std::thread load([&] { EXPECT_TRUE(LoadConstant(*second, 1).ok()); });
  EXPECT_TRUE(LoadConstant(*first, 1).ok());
  load.join();
  ASSERT_TRUE(PushConstant(*first, 1, 0, 1).ok());
  interrupted = true;
  EXPECT_TRUE(absl::IsCancelled(first->EndMicroStep(1, 0)));
  interrupted = false;
  ASSERT_TRUE(PushConstant(*second, 1, 0, 1).ok());
  ASSERT_TRUE(second->CommitStart(CommitOf(*second, 1)).ok());
  ASSERT_TRUE(first->Commit(CommitOf(*first, 1)).ok());
  ASSERT_TRUE(second->CommitWait().ok());
  ASSERT_TRUE(PushConstant(*first, 2, 0, 1).ok());
  interrupted = true;
  EXPECT_TRUE(absl::IsCancelled(first->EndMicroStep(2, 0)));
}

TEST_P(ReconnectTest, ADrainDoesNotHoldUpTheEnd) {
  daemon_.reset();
  auto daemon =
      TestDaemon::Start({.flags = {}, .config = "drain_timeout_s: 0\n"});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  const StepScript::Step step = Script().Make(1);
  ASSERT_TRUE(StepScript::Push(*session, step).ok());
  ASSERT_TRUE(session->Flush().ok());
  std::thread drain([&] {
    const absl::Status drained = daemon_->Drain(absl::Minutes(10), false);
    EXPECT_FALSE(drained.ok()) << "step 1 is open";
  });
  const absl::Status draining = crash::PollUntil("the drain", [&] {
    const auto status = daemon_->GetStatus();
    return status.ok() && status->draining();
  });
  EXPECT_TRUE(draining.ok()) << draining;
  const absl::Status ended = daemon_->Terminate();
  EXPECT_TRUE(ended.ok()) << ended;
  drain.join();
  ASSERT_TRUE(daemon_->Restart().ok());
  const auto outcome = session->Commit(step.commit);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ExpectUndisturbed(*session, 1);
}

TEST_P(ReconnectTest, DaemonGoneForGood) {
  client::SessionOptions options = Options();
  options.connect_timeout = absl::Seconds(1);
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  ASSERT_TRUE(daemon_->Terminate().ok());
  const auto outcome = Script().Run(*session, 1);
  EXPECT_FALSE(outcome.ok());
  EXPECT_THAT(outcome.status().message(), HasSubstr(endpoint()));
  EXPECT_THAT(outcome.status().message(), HasSubstr("not reached within 1s"));
}

TEST_P(ReconnectTest, DrainingIsPassedOnAtOnce) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  RunSteps(*session, 1, 1);
  const absl::Status drained = daemon_->Drain(absl::Seconds(30), false);
  ASSERT_TRUE(drained.ok()) << drained;
  const auto outcome = Script().Run(*session, 2);
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(outcome.status().message(), HasSubstr("draining"));
  client::SessionOptions options = Options();
  options.job = "another";
  EXPECT_EQ(Session::Open(options).status().code(),
            absl::StatusCode::kUnavailable);
  ASSERT_TRUE(daemon_->Drain(absl::Seconds(30), true).ok());
  RunSteps(*session, 2, 3);
  ExpectUndisturbed(*session, 3);
}

TEST_P(ReconnectTest, NobodyListensThere) {
  client::SessionOptions options = Options();
  options.endpoint += ".nowhere";
  const auto status = Session::Open(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(status.message(), HasSubstr(options.endpoint));
}

INSTANTIATE_TEST_SUITE_P(Wires, ReconnectTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate
