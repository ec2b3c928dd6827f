// Tests of several ranks of one job.

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/step_script.h"

namespace optstate {
namespace {

using Ranks = std::vector<std::unique_ptr<client::Session>>;

// Runs each rank's part on a thread of its own, as processes do.
void OnEveryRank(
    const Ranks& ranks,
    const std::function<void(uint32_t rank, client::Session&)>& part) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    threads.emplace_back([&, rank] { part(rank, *ranks[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
}

void ExpectStep(const Ranks& ranks, uint64_t step) {
  OnEveryRank(ranks, [step](uint32_t, client::Session& session) {
    const absl::Status pushed = PushConstant(session, step, 0, 1);
    EXPECT_TRUE(pushed.ok()) << pushed;
    const auto outcome = session.Commit(CommitOf(session, step));
    EXPECT_TRUE(outcome.ok()) << outcome.status();
  });
}

// The bits are those of one rank, however the work is cut.
TEST_P(ChannelSuite, RanksTogetherHaveTheBitsOfOne) {
  const uint64_t seed = ScriptSeed();
  for (const PartitionMode mode :
       {PartitionMode::kGreedy, PartitionMode::kContiguous}) {
    const auto one = OpenLoaded(NewJob(MixedLayout()));
    client::SessionOptions options = NewJob(MixedLayout());
    options.partition = mode;
    const Ranks ranks = OpenRanks(options, 3);
    ASSERT_NE(one, nullptr);
    ASSERT_EQ(ranks.size(), 3);
    const StepScript script(one->layout(), seed);
    for (uint64_t step = 1; step <= 4; ++step) {
      const auto expected = script.Run(*one, step);
      ASSERT_TRUE(expected.ok()) << expected.status();
      OnEveryRank(ranks, [&](uint32_t, client::Session& session) {
        const auto outcome = script.Run(session, step);
        ASSERT_TRUE(outcome.ok()) << outcome.status();
        EXPECT_EQ(outcome->gradient_norm, expected->gradient_norm);
      });
      const auto expected_snapshot = Snapshot(*one);
      ASSERT_TRUE(expected_snapshot.ok());
      for (const auto& session : ranks) {
        const auto snapshot = Snapshot(*session);
        ASSERT_TRUE(snapshot.ok()) << snapshot.status();
        ASSERT_EQ(FirstDifference(*snapshot, *expected_snapshot), "");
      }
    }
  }
}

TEST_P(ChannelSuite, UnequalCommitsAreRefusedToAll) {
  const Ranks ranks = OpenRanks(NewJob(UniformLayout(4, 100)), 2);
  ASSERT_EQ(ranks.size(), 2);
  OnEveryRank(ranks, [](uint32_t rank, client::Session& session) {
    EXPECT_TRUE(PushConstant(session, 1, 0, 1).ok());
    client::CommitOptions commit = CommitOf(session, 1);
    commit.groups[0][adam::kLr] += rank;
    EXPECT_EQ(session.Commit(commit).status().code(),
              absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(session.committed_step(), 0);
  });
  ExpectStep(ranks, 1);
}

TEST_P(ChannelSuite, OverflowOfOneRankSkipsForAll) {
  const Ranks ranks = OpenRanks(NewJob(UniformLayout(4, 100)), 2);
  ASSERT_EQ(ranks.size(), 2);
  OnEveryRank(ranks, [](uint32_t rank, client::Session& session) {
    EXPECT_TRUE(PushConstant(session, 1, 0, 1).ok());
    client::CommitOptions commit = CommitOf(session, 1);
    commit.found_inf = rank == 1;
    const auto outcome = session.Commit(commit);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->found_inf);
    EXPECT_FALSE(outcome->applied);
  });
  ExpectStep(ranks, 2);
}

TEST_P(ChannelSuite, DeadlineThenTheStepGoesOn) {
  client::SessionOptions options = NewJob(UniformLayout(4, 100));
  options.step_timeout = absl::Seconds(2);
  const Ranks ranks = OpenRanks(options, 2);
  ASSERT_EQ(ranks.size(), 2);
  const client::CommitOptions commit = CommitOf(*ranks[0], 1);
  ASSERT_TRUE(PushConstant(*ranks[0], 1, 0, 1).ok());
  EXPECT_EQ(ranks[0]->Commit(commit).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  // This rank has pushed already; going on needs no more than the commit.
  ASSERT_TRUE(PushConstant(*ranks[1], 1, 0, 1).ok());
  OnEveryRank(ranks, [&](uint32_t, client::Session& session) {
    const auto outcome = session.Commit(commit);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_DOUBLE_EQ(outcome->gradient_norm, 20);
  });
  ExpectStep(ranks, 2);
}

TEST_P(ChannelSuite, InterruptedCommitGoesOn) {
  std::atomic<bool> interrupted = false;
  client::SessionOptions options = NewJob(UniformLayout(4, 100));
  options.interrupted = [&] { return interrupted.load(); };
  const Ranks ranks = OpenRanks(options, 2);
  ASSERT_EQ(ranks.size(), 2);
  client::Session& session = *ranks[0];
  const client::CommitOptions commit = CommitOf(session, 1);
  ASSERT_TRUE(PushConstant(session, 1, 0, 1).ok());
  interrupted = true;
  EXPECT_EQ(session.Commit(commit).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_TRUE(session.info().commit_open);
  EXPECT_EQ(session.CommitWait().status().code(), absl::StatusCode::kCancelled);
  interrupted = false;
  EXPECT_EQ(PushConstant(session, 1, 0, 2).code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(PushConstant(*ranks[1], 1, 0, 1).ok());
  OnEveryRank(ranks, [&](uint32_t rank, client::Session& each) {
    const auto outcome = rank == 0 ? each.CommitWait() : each.Commit(commit);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->step, 1);
    EXPECT_DOUBLE_EQ(outcome->gradient_norm, 20);
  });
  EXPECT_FALSE(session.info().commit_open);
  ExpectStep(ranks, 2);
}

// The rank that leaves takes its commit along; the one that comes in its place
// takes the step.
TEST_P(ChannelSuite, ClosingGivesAnInterruptedCommitUp) {
  std::atomic<bool> interrupted = false;
  client::SessionOptions options = NewJob(UniformLayout(4, 100));
  options.interrupted = [&] { return interrupted.load(); };
  Ranks ranks = OpenRanks(options, 2);
  ASSERT_EQ(ranks.size(), 2);
  ASSERT_TRUE(PushConstant(*ranks[0], 1, 0, 3).ok());
  interrupted = true;
  EXPECT_EQ(ranks[0]->Commit(CommitOf(*ranks[0], 1)).status().code(),
            absl::StatusCode::kCancelled);
  interrupted = false;
  ranks[0]->Close();
  options.world_size = 2;
  options.rank = 0;
  auto again = Open(options);
  ASSERT_TRUE(again.ok()) << again.status();
  ranks[0] = *std::move(again);
  EXPECT_EQ(ranks[0]->committed_step(), 0);
  ExpectStep(ranks, 1);
}

TEST_P(ChannelSuite, AnotherWorldSizeIsRefused) {
  client::SessionOptions options = NewJob(UniformLayout(4, 100));
  const Ranks ranks = OpenRanks(options, 2);
  ASSERT_EQ(ranks.size(), 2);
  options.world_size = 3;
  options.rank = 2;
  EXPECT_EQ(Open(options).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ExpectStep(ranks, 1);
}

TEST_P(ChannelSuite, TwoJobsAtOnce) {
  const uint64_t seed = ScriptSeed();
  const auto model = MakeFakeWorld();
  std::vector<std::unique_ptr<client::Session>> jobs;
  std::vector<std::unique_ptr<client::Session>> expected;
  for (const LayoutSpec& layout : {MixedLayout(), UniformLayout(20, 1000)}) {
    auto job = Open(NewJob(layout));
    auto modelled = model->Open(NewJob(layout));
    ASSERT_TRUE(job.ok()) << job.status();
    ASSERT_TRUE(modelled.ok()) << modelled.status();
    const StepScript script((*job)->layout(), seed);
    ASSERT_TRUE(script.Load(**job).ok());
    ASSERT_TRUE(script.Load(**modelled).ok());
    jobs.push_back(*std::move(job));
    expected.push_back(*std::move(modelled));
  }
  for (uint64_t step = 1; step <= 3; ++step) {
    // The steps of both jobs are open at once before either is committed.
    std::vector<StepScript::Step> steps;
    for (auto& job : jobs) {
      steps.push_back(StepScript(job->layout(), seed).Make(step));
      ASSERT_TRUE(StepScript::Push(*job, steps.back()).ok());
    }
    for (size_t i = 0; i < jobs.size(); ++i) {
      const auto outcome = jobs[i]->Commit(steps[i].commit);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ASSERT_TRUE(
          StepScript(jobs[i]->layout(), seed).Run(*expected[i], step).ok());
    }
  }
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto a = Snapshot(*jobs[i]);
    const auto b = Snapshot(*expected[i]);
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_EQ(FirstDifference(*a, *b), "");
  }
}

}  // namespace
}  // namespace optstate
