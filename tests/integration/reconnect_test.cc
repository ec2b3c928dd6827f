// Tests with real processes that die: what the others see, and that no bit of
// the state tells.

#include <signal.h>
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
#include "client/fake_channel.h"
#include "client/fake_daemon.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/crash/poll_until.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/rank_process.h"

namespace optstate {
namespace {

using client::Session;
using testing::HasSubstr;

enum class Wire { kShm, kGrpc };

class ReconnectTest : public testing::TestWithParam<Wire> {
 protected:
  void SetUp() override {
    auto daemon = TestDaemon::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    seed_ = ScriptSeed();
  }

  void TearDown() override {
    if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
  }

  std::string endpoint() const {
    return GetParam() == Wire::kShm ? daemon_->shm_endpoint()
                                    : daemon_->grpc_endpoint();
  }

  client::SessionOptions Options(uint32_t rank = 0, uint32_t world_size = 1) {
    client::SessionOptions options;
    options.endpoint = endpoint();
    options.job = "job";
    options.layout = MixedLayout();
    options.rank = rank;
    options.world_size = world_size;
    return options;
  }

  std::unique_ptr<Session> Open(client::SessionOptions options) {
    auto session = Session::Open(std::move(options));
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }

  std::unique_ptr<RankProcess> StartRank(uint32_t rank, uint32_t world_size) {
    auto process = RankProcess::Start({.endpoint = endpoint(),
                                       .daemon_path = "",
                                       .job = "job",
                                       .rank = rank,
                                       .world_size = world_size,
                                       .seed = seed_});
    EXPECT_TRUE(process.ok()) << process.status();
    return process.ok() ? *std::move(process) : nullptr;
  }

  StepScript Script() const {
    return StepScript(*Layout::Make(MixedLayout()), seed_);
  }

  void RunSteps(Session& session, uint64_t first, uint64_t last) {
    for (uint64_t step = first; step <= last; ++step) {
      const auto outcome = Script().Run(session, step);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ASSERT_EQ(outcome->step, step);
    }
  }

  // Expects the state after `steps` steps in which nothing happened.
  void ExpectUndisturbed(Session& session, uint64_t steps) {
    client::FakeDaemon model;
    auto expected = Session::OpenOver(
        [&](client::ChannelSetup setup) {
          return client::MakeFakeChannel(&model, std::move(setup));
        },
        NewJob(MixedLayout()));
    ASSERT_TRUE(expected.ok()) << expected.status();
    ASSERT_TRUE(Script().Load(**expected).ok());
    RunSteps(**expected, 1, steps);
    const auto a = Snapshot(session);
    const auto b = Snapshot(**expected);
    ASSERT_TRUE(a.ok()) << a.status();
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_EQ(FirstDifference(*a, *b), "");
  }

  std::unique_ptr<TestDaemon> daemon_;
  uint64_t seed_ = 0;
};

TEST_P(ReconnectTest, EngineKilledBetweenSteps) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  const void* const parameter = session->parameter(0).data();
  for (uint64_t step = 1; step <= 9; step += 3) {
    RunSteps(*session, step, step + 2);
    const absl::Status killed = daemon_->KillEngine("job");
    ASSERT_TRUE(killed.ok()) << killed;
  }
  RunSteps(*session, 10, 10);
  EXPECT_EQ(session->parameter(0).data(), parameter);
  ExpectUndisturbed(*session, 10);
}

TEST_P(ReconnectTest, EngineKilledWithAStepStaged) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  RunSteps(*session, 1, 2);
  const StepScript::Step step = Script().Make(3);
  ASSERT_TRUE(StepScript::Push(*session, step).ok());
  ASSERT_TRUE(session->Flush().ok());
  ASSERT_TRUE(daemon_->KillEngine("job").ok());
  const auto outcome = session->Commit(step.commit);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->step, 3);
  ExpectUndisturbed(*session, 3);
}

// Rank 0 waits in its commit, rank 1 has pushed.
TEST_P(ReconnectTest, EngineKilledWhileARankWaits) {
  const auto first = Open(Options(0, 2));
  const auto second = Open(Options(1, 2));
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  std::thread load([&] { EXPECT_TRUE(Script().Load(*second).ok()); });
  EXPECT_TRUE(Script().Load(*first).ok());
  load.join();
  const StepScript::Step step = Script().Make(1);
  ASSERT_TRUE(StepScript::Push(*first, step).ok());
  ASSERT_TRUE(first->CommitStart(step.commit).ok());
  ASSERT_TRUE(StepScript::Push(*second, step).ok());
  ASSERT_TRUE(second->Flush().ok());
  ASSERT_TRUE(daemon_->KillEngine("job").ok());
  std::thread waiting([&] {
    const auto outcome = first->CommitWait();
    EXPECT_TRUE(outcome.ok()) << outcome.status();
  });
  const auto outcome = second->Commit(step.commit);
  waiting.join();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ExpectUndisturbed(*first, 1);
  ExpectUndisturbed(*second, 1);
}

TEST_P(ReconnectTest, AccumulatedGradientsOutliveTheEngine) {
  client::SessionOptions options = Options();
  options.accumulate = true;
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  client::SessionOptions undisturbed_options = Options();
  undisturbed_options.job = "undisturbed";
  undisturbed_options.accumulate = true;
  const auto undisturbed = Open(undisturbed_options);
  ASSERT_NE(undisturbed, nullptr);
  ASSERT_TRUE(Script().Load(*undisturbed).ok());
  for (uint64_t step = 1; step <= 3; ++step) {
    for (uint32_t micro_step = 0; micro_step < 3; ++micro_step) {
      const float value = 0.1F * static_cast<float>(step + micro_step);
      ASSERT_TRUE(PushConstant(*undisturbed, step, micro_step, value).ok());
      const absl::Status pushed =
          PushConstant(*session, step, micro_step, value);
      ASSERT_TRUE(pushed.ok()) << pushed;
      if (micro_step == step - 1) {
        ASSERT_TRUE(daemon_->KillEngine("job").ok());
      }
    }
    ASSERT_TRUE(undisturbed->Commit(CommitOf(*undisturbed, step)).ok());
    const auto outcome = session->Commit(CommitOf(*session, step));
    ASSERT_TRUE(outcome.ok()) << outcome.status();
  }
  for (uint32_t p = 0; p < session->layout().parameters().size(); ++p) {
    EXPECT_EQ(session->parameter(p), undisturbed->parameter(p));
  }
}

TEST_P(ReconnectTest, RankKilledWithAStepStaged) {
  const auto first = Open(Options(0, 2));
  auto second = StartRank(1, 2);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  ASSERT_TRUE(second->Send("load").ok());
  ASSERT_TRUE(Script().Load(*first).ok());
  ASSERT_TRUE(second->Receive().ok());
  ASSERT_TRUE(second->Send("step 1").ok());
  RunSteps(*first, 1, 1);
  ASSERT_TRUE(second->Receive().ok());

  const auto pushed = second->Do("push 2");
  ASSERT_TRUE(pushed.ok()) << pushed.status();
  const StepScript::Step step = Script().Make(2);
  ASSERT_TRUE(StepScript::Push(*first, step).ok());
  ASSERT_TRUE(first->CommitStart(step.commit).ok());
  ASSERT_TRUE(second->Kill().ok());
  second = StartRank(1, 2);
  ASSERT_NE(second, nullptr);
  const auto committed = second->Do("committed");
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(*committed, "1");
  ASSERT_TRUE(second->Send("step 2").ok());
  const auto outcome = first->CommitWait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  const auto answer = second->Receive();
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(*answer, "2 1");
  ExpectUndisturbed(*first, 2);
}

TEST_P(ReconnectTest, BothRanksKilledWithinAStep) {
  std::vector<std::unique_ptr<RankProcess>> ranks;
  const auto start = [&] {
    ranks.clear();
    ranks.push_back(StartRank(0, 2));
    ranks.push_back(StartRank(1, 2));
    ASSERT_TRUE(ranks[0] != nullptr && ranks[1] != nullptr);
  };
  const auto both = [&](const std::string& command) {
    for (auto& rank : ranks) ASSERT_TRUE(rank->Send(command).ok());
    for (auto& rank : ranks) {
      const auto answer = rank->Receive();
      ASSERT_TRUE(answer.ok()) << command << ": " << answer.status();
    }
  };
  start();
  both("load");
  both("step 1");
  both("step 2");
  // One rank waits in its commit, one has pushed.
  ASSERT_TRUE(ranks[0]->Do("push 3").ok());
  ASSERT_TRUE(ranks[1]->Do("push 3").ok());
  ASSERT_TRUE(ranks[0]->Send("commit 3").ok());
  for (auto& rank : ranks) ASSERT_TRUE(rank->Kill().ok());
  start();
  for (auto& rank : ranks) {
    const auto committed = rank->Do("committed");
    ASSERT_TRUE(committed.ok()) << committed.status();
    EXPECT_EQ(*committed, "2");
  }
  both("step 3");
  both("step 4");
  ASSERT_TRUE(ranks[0]->Kill().ok());
  const auto session = Open(Options(0, 2));
  ASSERT_NE(session, nullptr);
  ExpectUndisturbed(*session, 4);
}

TEST_P(ReconnectTest, DaemonKilledAndStartedAgain) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  RunSteps(*session, 1, 2);
  ASSERT_TRUE(daemon_->Kill().ok());
  const absl::Status started = daemon_->Restart();
  ASSERT_TRUE(started.ok()) << started;
  RunSteps(*session, 3, 4);
  ExpectUndisturbed(*session, 4);
}

TEST_P(ReconnectTest, DaemonTerminatedAndStartedAgain) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  RunSteps(*session, 1, 2);
  ASSERT_TRUE(daemon_->Terminate().ok());
  const absl::Status started = daemon_->Restart();
  ASSERT_TRUE(started.ok()) << started;
  RunSteps(*session, 3, 4);
  ExpectUndisturbed(*session, 4);
}

// A trainer that steps on and on is not refused a step: it waits.
TEST_P(ReconnectTest, DaemonTerminatedUnderATrainerThatSteps) {
  constexpr uint64_t kSteps = 60;
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  std::atomic<uint64_t> taken{0};
  std::thread trainer([&] {
    for (uint64_t step = 1; step <= kSteps && !HasFatalFailure(); ++step) {
      RunSteps(*session, step, step);
      taken.store(step);
      taken.notify_one();
    }
    taken.store(kSteps);
    taken.notify_one();
  });
  for (const uint64_t after : {kSteps / 3, 2 * kSteps / 3}) {
    for (uint64_t now = taken.load(); now < after; now = taken.load()) {
      taken.wait(now);
    }
    const absl::Status ended = daemon_->Terminate();
    EXPECT_TRUE(ended.ok()) << ended;
    const absl::Status started = daemon_->Restart();
    EXPECT_TRUE(started.ok()) << started;
  }
  trainer.join();
  ExpectUndisturbed(*session, kSteps);
}

// The termination does not end a step whose gradients are still accumulating.
// Sums of micro-steps stay, and no rank is told to begin anew.
TEST_P(ReconnectTest, DaemonTerminatedBetweenMicroSteps) {
  daemon_.reset();
  auto daemon =
      TestDaemon::Start({.flags = {}, .config = "drain_timeout_s: 0\n"});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
  const auto run = [&](const std::string& job,
                       const std::function<void()>& between) {
    std::unique_ptr<Session> ranks[2];
    const auto on_both = [&](const std::function<void(uint32_t)>& call) {
      std::thread other([&] { call(1); });
      call(0);
      other.join();
    };
    const auto micro_step = [&](uint32_t rank, uint32_t micro) {
      const absl::Status pushed =
          PushConstant(*ranks[rank], 1, micro, 0.25f + rank + 4 * micro);
      EXPECT_TRUE(pushed.ok()) << pushed;
      const absl::Status ended = ranks[rank]->EndMicroStep(1, micro);
      EXPECT_TRUE(ended.ok()) << ended;
    };
    on_both([&](uint32_t rank) {
      client::SessionOptions options = Options(rank, 2);
      options.job = job;
      options.layout = UniformLayout(2, 5000);
      options.partition = PartitionMode::kReplicated;
      options.accumulate = true;
      ranks[rank] = Open(options);
      EXPECT_TRUE(LoadConstant(*ranks[rank], 1.0f).ok());
      micro_step(rank, 0);
    });
    between();
    on_both([&](uint32_t rank) {
      micro_step(rank, 1);
      const auto outcome = ranks[rank]->Commit(CommitOf(*ranks[rank], 1));
      EXPECT_TRUE(outcome.ok()) << outcome.status();
    });
    return Snapshot(*ranks[0]);
  };
  const auto undisturbed = run("undisturbed", [] {});
  const auto disturbed = run("job", [&] {
    ASSERT_TRUE(daemon_->Terminate().ok());
    const absl::Status started = daemon_->Restart();
    ASSERT_TRUE(started.ok()) << started;
  });
  ASSERT_TRUE(undisturbed.ok()) << undisturbed.status();
  ASSERT_TRUE(disturbed.ok()) << disturbed.status();
  EXPECT_EQ(FirstDifference(*undisturbed, *disturbed), "");
}

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
    ::_exit(refused ? 0 : 1);
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

std::string WireName(const testing::TestParamInfo<Wire>& wire) {
  return wire.param == Wire::kShm ? "Shm" : "Grpc";
}

INSTANTIATE_TEST_SUITE_P(Wires, ReconnectTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate
