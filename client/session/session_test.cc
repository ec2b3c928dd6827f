// Tests what Session adds to a channel, above all recovery from a lost
// connection. The tests use the model, where every moment of a loss can be
// chosen.

#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "client/client.h"
#include "client/fake/failing_channel.h"
#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/unique_fd.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

class SessionTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Session>> Open(SessionOptions options) {
    return Session::OpenOver(
        [this](ChannelSetup setup) {
          return MakeFakeChannel(&daemon_, std::move(setup));
        },
        std::move(options));
  }

  // The faults outlive the session.
  absl::StatusOr<std::unique_ptr<Session>> OpenFailing(ChannelFaults* faults) {
    return Session::OpenOver(
        [this, faults](ChannelSetup setup) {
          return MakeFailingChannel(MakeFakeChannel(&daemon_, std::move(setup)),
                                    faults);
        },
        NewJob(UniformLayout(3, 50)));
  }

  std::unique_ptr<Session> OpenLoaded(SessionOptions options) {
    auto session = Open(std::move(options));
    EXPECT_TRUE(session.ok()) << session.status();
    EXPECT_TRUE(LoadConstant(**session, 1).ok());
    return *std::move(session);
  }

  static void Step(Session& session, uint64_t step) {
    ASSERT_TRUE(PushConstant(session, step, 0, 1).ok());
    ExpectCommit(session, step);
  }

  static void ExpectCommit(Session& session, uint64_t step) {
    const auto outcome = session.Commit(CommitOf(session, step));
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->step, step);
    EXPECT_EQ(session.committed_step(), step);
  }

  // Compares the state with that after `steps` steps without any fault.
  void ExpectUndisturbed(Session& session, uint64_t steps) {
    const auto plain = OpenLoaded(NewJob(UniformLayout(3, 50)));
    for (uint64_t step = 1; step <= steps; ++step) Step(*plain, step);
    const auto a = Snapshot(session);
    const auto b = Snapshot(*plain);
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_EQ(FirstDifference(*a, *b), "");
  }

  FakeDaemon daemon_;
};

TEST_F(SessionTest, GoesOnAfterALossBetweenSteps) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  Step(*session, 1);
  const void* const gradient = session->gradient(0)->data();
  const void* const parameter = session->parameter(0).data();
  EXPECT_EQ(session->info().connections, 1);
  daemon_.LoseConnections();
  Step(*session, 2);
  EXPECT_EQ(session->info().connections, 2);
  ExpectUndisturbed(*session, 2);
  EXPECT_EQ(session->gradient(0)->data(), gradient);
  EXPECT_EQ(session->parameter(0).data(), parameter);
}

TEST_F(SessionTest, PushesAgainWhatWasStaged) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  Step(*session, 1);
  ASSERT_TRUE(PushConstant(*session, 2, 0, 1).ok());
  daemon_.LoseConnections();
  ExpectCommit(*session, 2);
  ExpectUndisturbed(*session, 2);
}

TEST_F(SessionTest, PushesAgainBetweenTwoPushes) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  for (uint32_t i = 0; i < 3; ++i) {
    const auto gradient = ConstantGradient(session->layout(), i, 1);
    std::memcpy(session->gradient(i)->data(), gradient.data(), gradient.size());
    daemon_.LoseConnections();
    ASSERT_TRUE(session->Push(1, 0, i, 1).ok());
  }
  ExpectCommit(*session, 1);
  ExpectUndisturbed(*session, 1);
}

TEST_F(SessionTest, TakesTheRecordedOutcomeOfAStepWhoseAnswerWasLost) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  daemon_.LoseConnectionsAfterNextStep();
  ExpectCommit(*session, 1);
  Step(*session, 2);
  ExpectUndisturbed(*session, 2);
}

// A session that loses the engine and closes tells the next engine once.
TEST_F(SessionTest, ClosedAfterALoss) {
  auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  session.reset();
  EXPECT_EQ(daemon_.farewells(), 0) << "that one was told";
  session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  daemon_.LoseConnections();
  session->Close();
  session.reset();
  EXPECT_EQ(daemon_.farewells(), 1);
  // Without a daemon no farewell is sent.
  session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  daemon_.LoseConnections();
  daemon_.RefuseOpens(1);
  session.reset();
  EXPECT_EQ(daemon_.farewells(), 1);
}

TEST_F(SessionTest, LossBetweenTheHalvesOfACommit) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  ASSERT_TRUE(session->CommitStart(CommitOf(*session, 1)).ok());
  daemon_.LoseConnections();
  const auto outcome = session->CommitWait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ExpectUndisturbed(*session, 1);
}

TEST_F(SessionTest, LostMicroStepsAbortTheStep) {
  SessionOptions options = NewJob(UniformLayout(3, 50));
  options.accumulate = true;
  const auto session = OpenLoaded(options);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 0.5).ok());
  ASSERT_TRUE(PushConstant(*session, 1, 1, 0.5).ok());
  daemon_.LoseConnections();
  const auto lost = session->Commit(CommitOf(*session, 1));
  EXPECT_EQ(lost.status().code(), StatusCode::kAborted);
  EXPECT_THAT(lost.status().message(),
              HasSubstr("accumulated gradients of step 1 were lost; run the "
                        "step again"));
  ASSERT_TRUE(PushConstant(*session, 1, 0, 0.5).ok());
  ASSERT_TRUE(PushConstant(*session, 1, 1, 0.5).ok());
  ExpectCommit(*session, 1);
  ExpectUndisturbed(*session, 1);
}

// After a flush the caller may have begun to write the next micro-step.
TEST_F(SessionTest, FlushedMicroStepIsLostToo) {
  SessionOptions options = NewJob(UniformLayout(3, 50));
  options.accumulate = true;
  const auto session = OpenLoaded(options);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  ASSERT_TRUE(session->Flush().ok());
  daemon_.LoseConnections();
  EXPECT_EQ(session->Commit(CommitOf(*session, 1)).status().code(),
            StatusCode::kAborted);
  Step(*session, 1);
  ExpectUndisturbed(*session, 1);
}

TEST_F(SessionTest, SingleMicroStepIsPushedAgain) {
  SessionOptions options = NewJob(UniformLayout(3, 50));
  options.accumulate = true;
  const auto session = OpenLoaded(options);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  daemon_.LoseConnections();
  ExpectCommit(*session, 1);
  ExpectUndisturbed(*session, 1);
}

TEST_F(SessionTest, TriesUntilTheDaemonIsBack) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  Step(*session, 1);
  daemon_.LoseConnections();
  daemon_.RefuseOpens(3);
  Step(*session, 2);
  ExpectUndisturbed(*session, 2);
}

// A killed daemon leaves its socket, a stopped daemon the lock beside it.
TEST_F(SessionTest, TheFirstConnectWaitsForADaemonThatComesBack) {
  SessionOptions options = NewJob(UniformLayout(3, 50));
  std::string directory =
      "/tmp/optstate-session-XXXXXX";  // short, as a socket's path must be
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  const std::string path = directory + "/away.sock";
  options.endpoint = "unix:" + path;
  daemon_.RefuseOpens(1);
  EXPECT_EQ(Open(options).status().code(), StatusCode::kUnavailable);
  const auto expect_waits = [&](const std::string& left) {
    daemon_.RefuseOpens(3);
    const auto session = Open(options);
    EXPECT_TRUE(session.ok()) << session.status();
    std::filesystem::remove(left);
  };
  std::ofstream(path + ".lock") << "left";
  expect_waits(path + ".lock");
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address),
                   sizeof(address)),
            0);
  expect_waits(path);
  std::ofstream(path) << "no socket";
  daemon_.RefuseOpens(1);
  EXPECT_EQ(Open(options).status().code(), StatusCode::kUnavailable);
  std::filesystem::remove(path);
  std::filesystem::remove(directory);
}

TEST_F(SessionTest, GivesUpAtTheConnectTimeout) {
  SessionOptions options = NewJob(UniformLayout(3, 50));
  options.connect_timeout = absl::Milliseconds(50);
  const auto session = OpenLoaded(options);
  daemon_.LoseConnections();
  daemon_.RefuseOpens(1'000'000);
  const absl::Status status = session->Flush();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("connection refused"));
  EXPECT_THAT(status.message(), HasSubstr(options.job));
  // Once the daemon is back, the session continues where it was.
  daemon_.RefuseOpens(0);
  Step(*session, 1);
}

TEST_F(SessionTest, AnInterruptEndsTheSearchForALostDaemon) {
  std::atomic<bool> interrupted = false;
  SessionOptions options = NewJob(UniformLayout(3, 50));
  options.interrupted = [&] { return interrupted.load(); };
  const auto session = OpenLoaded(options);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  daemon_.LoseConnections();
  daemon_.RefuseOpens(1'000'000);
  interrupted = true;
  EXPECT_EQ(session->Commit(CommitOf(*session, 1)).status().code(),
            StatusCode::kCancelled);
  EXPECT_TRUE(session->info().commit_open);
  interrupted = false;
  daemon_.RefuseOpens(0);
  const auto outcome = session->CommitWait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  Step(*session, 2);
  ExpectUndisturbed(*session, 2);
}

TEST_F(SessionTest, FirstConnectionFailsAtOnce) {
  daemon_.RefuseOpens(1);
  EXPECT_EQ(Open(NewJob(UniformLayout(1, 1))).status().code(),
            StatusCode::kUnavailable);
}

TEST_F(SessionTest, LossDuringALoadIsTold) {
  auto session = Open(NewJob(UniformLayout(3, 50)));
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->BeginLoad().ok());
  daemon_.LoseConnections();
  const absl::Status status = (*session)->FinishLoad();
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_THAT(status.message(), HasSubstr("begin the load again"));
  ASSERT_TRUE(LoadConstant(**session, 1).ok());
  Step(**session, 1);
}

TEST_F(SessionTest, LoadWhoseAnswerWasLostIsFinished) {
  auto session = Open(NewJob(UniformLayout(3, 50)));
  ASSERT_TRUE(session.ok()) << session.status();
  daemon_.LoseConnectionsAfterNextLoad();
  ASSERT_TRUE(LoadConstant(**session, 1).ok());
  EXPECT_EQ((*session)->info().phase, JobPhase::kReady);
  Step(**session, 1);
  ExpectUndisturbed(**session, 1);
}

TEST_F(SessionTest, BeginAtAStepWhoseAnswerWasLostIsFinished) {
  auto session = Open(NewJob(UniformLayout(3, 50)));
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE(LoadConstant(**session, 1).ok());
  ASSERT_TRUE((*session)->BeginLoad().ok());
  daemon_.LoseConnectionsAfterNextLoad();
  ASSERT_TRUE((*session)->FinishLoad(BeginAt{7, 4}).ok());
  EXPECT_EQ((*session)->committed_step(), 7);
  Step(**session, 8);
  // One whose connection was lost before is to be begun again.
  auto other = Open(NewJob(UniformLayout(3, 50)));
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE(LoadConstant(**other, 1).ok());
  ASSERT_TRUE((*other)->BeginLoad().ok());
  daemon_.LoseConnections();
  EXPECT_EQ((*other)->FinishLoad(BeginAt{7, 4}).code(), StatusCode::kAborted);
  EXPECT_EQ((*other)->committed_step(), 0);
}

TEST_F(SessionTest, AnOlderDaemonIsNotAskedToBeginAtAStep) {
  daemon_.ForgetBeginAt();
  auto session = Open(NewJob(UniformLayout(3, 50)));
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE(LoadConstant(**session, 1).ok());
  ASSERT_TRUE((*session)->BeginLoad().ok());
  const absl::Status refused = (*session)->FinishLoad(BeginAt{7, 4});
  EXPECT_EQ(refused.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(refused.message(), HasSubstr("optctl upgrade"));
  // The load goes on.
  ASSERT_TRUE((*session)->FinishLoad().ok());
  Step(**session, 1);
}

// A lost load is not taken for a finished one only because the job was ready
// before.
TEST_F(SessionTest, LossDuringALoadOfAReadyJobIsTold) {
  auto session = Open(NewJob(UniformLayout(3, 50)));
  ASSERT_TRUE(session.ok()) << session.status();
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(LoadConstant(**session, 1).ok());
    ASSERT_TRUE((*session)->BeginLoad().ok());
    daemon_.LoseConnections();
    EXPECT_EQ((*session)->FinishLoad().code(), StatusCode::kAborted);
  }
  daemon_.LoseConnectionsAfterNextLoad();
  ASSERT_TRUE(LoadConstant(**session, 1).ok());
  Step(**session, 1);
  ExpectUndisturbed(**session, 1);
}

// Rank 1 comes too late. Rank 0 may go on waiting, or begin the step again.
TEST_F(SessionTest, AfterTheDeadlineCommitGoesOnAndPushBeginsAnew) {
  SessionOptions options = NewJob(UniformLayout(1, 50));
  options.world_size = 2;
  options.step_timeout = absl::Milliseconds(20);
  auto first = Open(options);
  options.step_timeout = absl::Seconds(60);
  options.rank = 1;
  auto second = Open(options);
  ASSERT_TRUE(first.ok() && second.ok());
  Session& owner = (*first)->piece_count() == 1 ? **first : **second;
  ASSERT_EQ(&owner, first->get()) << "the first rank owns the parameter";
  std::thread load([&] { EXPECT_TRUE(LoadConstant(**second, 1).ok()); });
  EXPECT_TRUE(LoadConstant(owner, 1).ok());
  load.join();
  ASSERT_TRUE(PushConstant(owner, 1, 0, 7).ok());
  EXPECT_EQ(owner.Commit(CommitOf(owner, 1)).status().code(),
            StatusCode::kDeadlineExceeded);
  EXPECT_EQ(owner.Commit(CommitOf(owner, 1)).status().code(),
            StatusCode::kDeadlineExceeded);
  // This attempt pushes other gradients.
  ASSERT_TRUE(PushConstant(owner, 1, 0, 1).ok());
  ASSERT_TRUE((*second)->CommitStart(CommitOf(**second, 1)).ok());
  const auto outcome = owner.Commit(CommitOf(owner, 1));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_DOUBLE_EQ(outcome->gradient_norm, std::sqrt(50.0));
  EXPECT_TRUE((*second)->CommitWait().ok());
}

// The daemon would ignore other gradients as a repeat of those that it has.
TEST_F(SessionTest, WhatAnAbortCouldNotDropIsDroppedBeforeTheNextPush) {
  ChannelFaults faults;
  const auto session = OpenFailing(&faults);
  ASSERT_TRUE(session.ok()) << session.status();
  Session& rank = **session;
  ASSERT_TRUE(LoadConstant(rank, 1).ok());
  ASSERT_TRUE(PushConstant(rank, 1, 0, 7).ok());
  faults.lost_aborts = 2;
  EXPECT_EQ(rank.Abort(1).code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(PushConstant(rank, 1, 0, 1).code(), StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(PushConstant(rank, 1, 0, 1).ok());
  ExpectCommit(rank, 1);
  ExpectUndisturbed(rank, 1);
  // A commit does not take them either.
  ASSERT_TRUE(PushConstant(rank, 2, 0, 7).ok());
  faults.lost_aborts = 1;
  EXPECT_EQ(rank.Abort(2).code(), StatusCode::kDeadlineExceeded);
  const auto outcome = rank.Commit(CommitOf(rank, 2));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->gradient_norm, 0);
}

// The session itself drops a step of which a push was refused.
TEST_F(SessionTest, ARefusedStepThatCouldNotBeDroppedIsDroppedByTheNextPush) {
  ChannelFaults faults;
  const auto session = OpenFailing(&faults);
  ASSERT_TRUE(session.ok()) << session.status();
  Session& rank = **session;
  ASSERT_TRUE(LoadConstant(rank, 1).ok());
  ASSERT_TRUE(PushConstant(rank, 1, 0, 7).ok());
  faults = {.refused_pushes = 1, .lost_aborts = 1};
  EXPECT_EQ(rank.Push(1, 0, 0, 1).code(), StatusCode::kInvalidArgument);
  Step(rank, 1);
  ExpectUndisturbed(rank, 1);
}

TEST_F(SessionTest, VanishedJobIsNotCreatedAgain) {
  SessionOptions options = NewJob(UniformLayout(3, 50));
  options.ephemeral = true;
  const auto session = OpenLoaded(options);
  daemon_.LoseConnections();
  // Another session opens and closes, which deletes the ephemeral job.
  ASSERT_TRUE(Open(options).ok());
  EXPECT_EQ(session->Flush().code(), StatusCode::kNotFound);
}

TEST_F(SessionTest, ForkedChildLeavesTheParentsSessionAlone) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool refused =
        session->Flush().code() == StatusCode::kFailedPrecondition;
    session->Close();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  Step(*session, 1);
}

TEST_F(SessionTest, PushGradientsChecksItsArguments) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 50)));
  const auto gradient = ConstantGradient(session->layout(), 0, 1);
  const void* const pointers[] = {gradient.data(), gradient.data()};
  const uint32_t descending[] = {1, 0};
  EXPECT_EQ(session->PushGradients(1, 0, descending, pointers).code(),
            StatusCode::kInvalidArgument);
  const uint32_t unknown[] = {0, 3};
  EXPECT_EQ(session->PushGradients(1, 0, unknown, pointers).code(),
            StatusCode::kInvalidArgument);
  const uint32_t two[] = {0, 1};
  EXPECT_EQ(
      session->PushGradients(1, 0, two, absl::MakeSpan(pointers, 1)).code(),
      StatusCode::kInvalidArgument);
  const void* const nulls[] = {gradient.data(), nullptr};
  EXPECT_EQ(session->PushGradients(1, 0, two, nulls).code(),
            StatusCode::kInvalidArgument);
}

TEST_F(SessionTest, ErrorsNameJobAndEndpoint) {
  SessionOptions options = NewJob(UniformLayout(3, 50));
  options.endpoint = "unix:/somewhere";
  const auto session = OpenLoaded(options);
  const auto status = session->Commit(CommitOf(*session, 9)).status();
  EXPECT_THAT(status.message(), HasSubstr(options.job));
  EXPECT_THAT(status.message(), HasSubstr("unix:/somewhere"));
}

}  // namespace
}  // namespace optstate::client
