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
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/crash/poll_until.h"
#include "tests/integration/reconnect_fixture.h"

namespace optstate {
namespace {

using client::Session;
using testing::HasSubstr;

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

INSTANTIATE_TEST_SUITE_P(Wires, ReconnectTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate
