#include "server/engine/awaited_ranks.h"

#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/os/process_stat.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_harness.h"
#include "storage/testing/test_mounts.h"

namespace optstate::engine {
namespace {

class AwaitedRanksTest : public testing::Test {
 protected:
  // Restarts the job as if a rank of `process` was attached when the engine
  // ended.
  void StartAgain(const session::RankProcess& process) {
    session::JobHarness::Setup setup;
    setup.layout.groups = {{}};
    setup.layout.parameters = {session::MakeParameter("a", 100)};
    setup.world_size = 1;
    setup.client_instance = 5;
    setup.processes = {process};
    harness_ = std::make_unique<session::JobHarness>(setup);
    harness_->AttachAll();
    harness_->Close();
    ASSERT_TRUE(harness_->Open().ok());
  }
  AwaitedRanks Watch(absl::Duration patience = absl::Hours(1)) {
    return {&harness_->job(), patience};
  }
  bool IsAwaited() const { return !harness_->job().Awaited().empty(); }

  static constexpr int kCannotHide = 77;
  // Runs where the rank's /proc is hidden: reports on `tell` that the rank is
  // awaited, and waits for its end. Returns 0 on success.
  int LookFromHiding(int tell) {
    constexpr uid_t kNobody = 65534;
    if (!harness_->Open().ok()) return 6;
    const pid_t rank = harness_->job().Awaited()[0].process.pid;
    if (!storage::EnterPrivateMounts().ok() ||
        ::mount("proc", "/proc", "proc", 0, "hidepid=2") != 0 ||
        ::setgroups(0, nullptr) != 0 ||
        ::setresgid(kNobody, kNobody, kNobody) != 0 ||
        ::setresuid(kNobody, kNobody, kNobody) != 0) {
      return kCannotHide;
    }
    if (!absl::IsNotFound(os::ReadProcessStat(rank).status())) return 1;
    AwaitedRanks ranks = Watch();
    ranks.GiveUpEnded();
    if (!IsAwaited() || ranks.deadline() != absl::InfiniteFuture()) return 2;
    std::vector<pollfd> fds;
    ranks.AppendTo(&fds);
    if (fds.size() != 1 || ::write(tell, "a", 1) != 1) return 3;
    if (::poll(fds.data(), 1, -1) != 1) return 4;
    ranks.GiveUpEnded();
    return IsAwaited() ? 5 : 0;
  }

  static uint64_t StartOf(pid_t pid) {
    return os::ReadProcessStat(pid)->start_ticks;
  }

  std::unique_ptr<session::JobHarness> harness_;
};

TEST_F(AwaitedRanksTest, UntilItsProcessEnds) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  StartAgain({.pid = child, .start_ticks = StartOf(child)});
  AwaitedRanks ranks = Watch();
  ranks.GiveUpEnded();
  EXPECT_TRUE(IsAwaited());
  EXPECT_EQ(ranks.deadline(), absl::InfiniteFuture());
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  std::vector<pollfd> fds;
  ranks.AppendTo(&fds);
  ASSERT_EQ(fds.size(), 1u);
  ASSERT_EQ(::poll(fds.data(), 1, -1), 1);
  ranks.GiveUpEnded();
  EXPECT_FALSE(IsAwaited());
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  // The process may also have ended before the first look.
  StartAgain({.pid = child, .start_ticks = 1});
  AwaitedRanks late = Watch();
  EXPECT_LT(late.deadline(), absl::Now());
  late.GiveUpEnded();
  EXPECT_FALSE(IsAwaited());
}

// The process may not be inspected: the rank is awaited, and its end is
// noticed.
TEST_F(AwaitedRanksTest, AlsoOneThatProcHides) {
  const pid_t rank = ::fork();
  if (rank == 0) {
    ::pause();
    ::_exit(0);
  }
  StartAgain({.pid = rank, .start_ticks = StartOf(rank)});
  harness_->Close();  // its threads would not be there in the child
  int pipe[2];
  ASSERT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  const pid_t looks = ::fork();
  if (looks == 0) ::_exit(LookFromHiding(pipe[1]));
  ::close(pipe[1]);
  char awaited = 0;
  EXPECT_LE(::read(pipe[0], &awaited, 1), 1);  // 0: it has ended
  ::close(pipe[0]);
  ASSERT_EQ(::kill(rank, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(looks, &status, 0), looks);
  ASSERT_EQ(::waitpid(rank, nullptr, 0), rank);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kCannotHide) {
    GTEST_SKIP() << "mounting /proc with hidepid takes root";
  }
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(AwaitedRanksTest, NotALaterProcessWithItsPid) {
  const uint64_t start = StartOf(::getpid());
  StartAgain({.pid = ::getpid(), .start_ticks = start});
  Watch().GiveUpEnded();
  EXPECT_TRUE(IsAwaited());
  StartAgain({.pid = ::getpid(), .start_ticks = start - 1});
  Watch().GiveUpEnded();
  EXPECT_FALSE(IsAwaited());
  // The rank is awaited as long as its process may be running.
  StartAgain({.pid = ::getpid()});
  Watch().GiveUpEnded();
  EXPECT_TRUE(IsAwaited());
}

TEST_F(AwaitedRanksTest, OneThatCannotBeWatchedHasItsTime) {
  StartAgain({});
  const absl::Time before = absl::Now();
  AwaitedRanks ranks = Watch();
  EXPECT_GE(ranks.deadline(), before + absl::Hours(1));
  EXPECT_LE(ranks.deadline(), absl::Now() + absl::Hours(1));
  ranks.GiveUpEnded();
  EXPECT_TRUE(IsAwaited());
  Watch(absl::ZeroDuration()).GiveUpEnded();
  EXPECT_FALSE(IsAwaited());
}

class DiesInStep final : public scheduler::StepObserver {
 public:
  void OnStepMarked(uint64_t) override { ::kill(::getpid(), SIGKILL); }
};

// The rank came back within its time, without its gradients, and left again.
TEST_F(AwaitedRanksTest, AlsoOneThatIsAwaitedAnew) {
  StartAgain({});
  harness_->Close();
  const pid_t engine = ::fork();
  if (engine == 0) {
    DiesInStep observer;
    harness_->setup().observer = &observer;
    if (!harness_->Open().ok()) ::_exit(1);
    harness_->Start(harness_->RandomTensors(1));
    const std::vector<Hyperparams> groups(1);
    session::CommitSpec commit;
    commit.step = 1;
    commit.groups = groups;
    harness_->Step(1, harness_->RandomTensors(2), commit);
    ::_exit(2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(engine, &status, 0), engine);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  ASSERT_TRUE(harness_->Open().ok());
  AwaitedRanks ranks = Watch(absl::ZeroDuration());
  ASSERT_TRUE(harness_->Register(0).ok());
  session::AttachSpec spec = harness_->AttachSpecOf(0);
  spec.gradients_present = false;
  ASSERT_TRUE(harness_->job().Attach(spec).ok());
  ranks.GiveUpEnded();
  harness_->Detach(0);
  EXPECT_TRUE(IsAwaited());
  ranks.GiveUpEnded();
  EXPECT_TRUE(IsAwaited()) << "by the old list";
  ranks.Refresh();
  ranks.GiveUpEnded();
  EXPECT_FALSE(IsAwaited());
  EXPECT_EQ(harness_->job().Describe().phase(), v1::JOB_PHASE_FAILED);
}

TEST_F(AwaitedRanksTest, NotOneThatIsBack) {
  StartAgain({});
  AwaitedRanks ranks = Watch(absl::ZeroDuration());
  harness_->AttachAll();
  ranks.GiveUpEnded();
  EXPECT_EQ(harness_->job().Describe().sessions_size(), 1);
  harness_->Close();
  ASSERT_TRUE(harness_->Open().ok());
  EXPECT_TRUE(IsAwaited());
}

}  // namespace
}  // namespace optstate::engine
