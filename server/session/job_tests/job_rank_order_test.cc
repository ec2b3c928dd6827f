// The loss, failure or return of a rank is interrupted after each store to the
// job's files, in turn, and must be whole from there, or not have begun.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_order_fixture.h"

namespace optstate::session {
namespace {

class DiesInStep final : public scheduler::StepObserver {
 public:
  void OnStepMarked(uint64_t) override { ::kill(::getpid(), SIGKILL); }
};

// A fixture with two ranks, of which one comes or goes.
class RankOrderTest : public JobOrderTest {
 protected:
  static constexpr uint32_t kRank = 1;
  static constexpr RankProcess kFirst = {.pid = 1001, .start_ticks = 5001};
  static constexpr RankProcess kSecond = {.pid = 1002, .start_ticks = 5002};

  void BringBack(uint32_t rank) {
    ASSERT_TRUE(copy_.Register(rank).ok());
    ASSERT_TRUE(copy_.Attach(rank).ok());
    copy_.SetGradients(copy_.RandomTensors(3));
  }
  void PushAndCommitOf(uint32_t rank) {
    ASSERT_TRUE(copy_.Push(rank, 3, 0, 1).ok());
    ASSERT_TRUE(copy_.Push(rank, 3, 2, 3).ok());
    copy_.Commit(rank, CommitOf(3));
  }
  void DieInStep3() {
    const pid_t child = ::fork();
    if (child == 0) {
      DiesInStep observer;
      harness_.setup().observer = &observer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      PushAndCommit(&harness_);
      ::_exit(2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
  }
  // Gives up a rank as the process does that watches for ranks that do not
  // return.
  void GiveUp(uint32_t rank) {
    for (const FormerRank& former : copy_.job().Awaited()) {
      if (former.rank == rank) copy_.job().GiveUp(former);
    }
  }
};

// The failure comes in a step that is to be finished: no rank waits for
// gradients that no rank has.
TEST_P(RankOrderTest, AFailureIsWholeOrNotAtAllFromEveryStore) {
  DieInStep3();
  attach_all_ = false;
  size_t failed = 0;
  const int states = StepThrough(
      [&] {
        if (!harness_.Register(0).ok()) ::_exit(2);
        if (!harness_.Attach(0).ok()) ::_exit(3);
      },
      [&] {
        harness_.job().GiveUp({.rank = kRank, .client_instance = 40 + kRank});
      },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        if (copy_.job().Describe().phase() == v1::JOB_PHASE_FAILED) {
          ++failed;
          return;
        }
        EXPECT_EQ(copy_.job().Describe().phase(), v1::JOB_PHASE_RECOVERING);
        EXPECT_EQ(copy_.job().Awaited().size(), 2u);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GE(failed, 3u);  // not attached, for which rank, given up
  EXPECT_GT(states, static_cast<int>(failed));
}

// The other rank waits for the lost one.
TEST_P(RankOrderTest, ALossIsToldFromEveryStore) {
  const int states = StepThrough(
      [&] {
        Push(&harness_);
        harness_.Commit(0, CommitOf(3));
      },
      [&] { harness_.Detach(kRank); },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        GiveUp(kRank);
        BringBack(0);
        const size_t told = copy_.NoticesTo(0).size();
        PushAndCommitOf(0);
        ASSERT_EQ(copy_.NoticesTo(0).size(), told + 1);
        EXPECT_EQ(copy_.NoticesTo(0).back(),
                  "rank 1 lost at step 3, waiting for its return");
        BringBack(kRank);
        PushAndCommitOf(kRank);
        EXPECT_TRUE(copy_.StateBytes() == expected_);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GE(states, 3);
}

// Another session attaches in a rank's place. A process is never taken for
// another one.
TEST_P(RankOrderTest, AnAttachIsWholeOrNotAtAllFromEveryStore) {
  const auto come = [&](uint64_t instance, const RankProcess& process) {
    harness_.Detach(kRank);
    if (!harness_.Register(kRank).ok()) ::_exit(2);
    harness_.setup().client_instance = instance;
    harness_.setup().processes = {{}, process};
  };
  const auto attach = [&] {
    if (!harness_.Attach(kRank).ok()) ::_exit(3);
  };
  size_t away = 0;
  size_t known = 0;
  const int states = StepThrough(
      [&] {
        come(50, kFirst);
        attach();
        come(60, kSecond);
      },
      attach,
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        const std::vector<FormerRank> awaited = copy_.job().Awaited();
        ASSERT_FALSE(awaited.empty());
        EXPECT_EQ(awaited[0].rank, 0u);
        if (awaited.size() == 1) {
          ++away;
          return;
        }
        EXPECT_EQ(awaited[1].rank, kRank);
        EXPECT_EQ(awaited[1].client_instance, 60 + kRank);
        ++known;
        EXPECT_EQ(awaited[1].process.pid, kSecond.pid);
        EXPECT_EQ(awaited[1].process.start_ticks, kSecond.start_ticks);
      },
      [&] { return known > 0; });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GT(away, 2u);
}

// A session that returns after its engine died is awaited throughout.
TEST_P(RankOrderTest, WhoIsBackStaysAttachedFromEveryStore) {
  const auto open_again = [&](const RankProcess& process) {
    harness_.setup().processes = {{}, process};
    harness_.Close();
    if (!harness_.Open().ok()) ::_exit(2);
    if (!harness_.Register(kRank).ok()) ::_exit(3);
  };
  const auto attach = [&] {
    if (!harness_.Attach(kRank).ok()) ::_exit(4);
  };
  std::set<pid_t> seen;
  const int states = StepThrough(
      [&] {
        open_again(kFirst);
        attach();
        open_again(kSecond);
      },
      attach,
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        const std::vector<FormerRank> awaited = copy_.job().Awaited();
        ASSERT_EQ(awaited.size(), 2u);
        EXPECT_EQ(awaited[1].client_instance, 40 + kRank);
        const RankProcess& process = awaited[1].process;
        seen.insert(process.pid);
        if (process.pid == kFirst.pid) {
          EXPECT_EQ(process.start_ticks, kFirst.start_ticks);
        } else if (process.pid == kSecond.pid) {
          EXPECT_EQ(process.start_ticks, kSecond.start_ticks);
        }
      },
      [&] { return seen.contains(kSecond.pid); });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_TRUE(seen.contains(0)) << "nobody's, in between";
}

INSTANTIATE_TEST_SUITE_P(Ranks, RankOrderTest, ::testing::Values(kReduced),
                         [](const auto& param_info) {
                           return param_info.param.name;
                         });

}  // namespace
}  // namespace optstate::session
