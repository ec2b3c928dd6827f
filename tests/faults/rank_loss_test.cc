// Tests of a rank's process that dies: what is left of it, and what the others
// are told.

#include <signal.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/crash/poll_until.h"
#include "tests/faults/fault_fixture.h"
#include "tests/faults/process_state.h"

namespace optstate::faults {
namespace {

using client::Session;
using testing::HasSubstr;

class RankLossTest : public WireFaultTest {
 protected:
  // The resources that a rank takes of the daemon and its engine.
  struct Resources {
    size_t supervisor_fds = 0;
    size_t engine_fds = 0;
    size_t engine_memory = 0;
    size_t staging_files = 0;

    bool Within(const Resources& other) const {
      return supervisor_fds <= other.supervisor_fds &&
             engine_fds <= other.engine_fds &&
             engine_memory <= other.engine_memory &&
             staging_files <= other.staging_files;
    }
    std::string ToString() const {
      return absl::StrCat(supervisor_fds, " fds of the supervisor, ",
                          engine_fds, " of the engine, ", engine_memory,
                          " mappings, ", staging_files, " staging files");
    }
  };

  Resources Count() const {
    return {.supervisor_fds = OpenFds(daemon_->process().pid()),
            .engine_fds = OpenFds(engine()),
            .engine_memory = MemfdMappings(engine()),
            .staging_files = CountFiles(JobDirectory(), "gradients.")};
  }

  // Waits until the supervisor keeps an fd for each rank with shared memory; it
  // gets them asynchronously.
  void AwaitKept(size_t ranks) const {
    if (wire_ != Wire::kShm) return;
    const absl::Status kept = crash::PollUntil("the kept gradients", [&] {
      return MemfdFds(daemon_->process().pid()) == ranks;
    });
    EXPECT_TRUE(kept.ok()) << kept;
  }

  void AwaitFreed(const Resources& before) const {
    const absl::Status freed = crash::PollUntil(
        "the rank's resources", [&] { return Count().Within(before); });
    EXPECT_TRUE(freed.ok()) << freed << ": " << Count().ToString()
                            << ", before it came " << before.ToString();
  }

  void Start(const std::string& on_rank_loss, bool second_over_tcp = false) {
    StartDaemon({.tcp = second_over_tcp,
                 .flags = {},
                 .config = "engine:\n  on_rank_loss: " + on_rank_loss +
                           "\nlimits:\n  rank_return_timeout_ms: 1\n"});
    ASSERT_FALSE(HasFatalFailure());
    client::SessionOptions options = Options(0, 2);
    options.notice = [this](const std::string& text) {
      notice_ = text;
      noticed_.Notify();
    };
    first_ = Open(options);
    ASSERT_NE(first_, nullptr);
    AwaitKept(1);
    alone_ = Count();
    std::string endpoint_of_second = endpoint();
    if (second_over_tcp) {
      const auto tcp = daemon_->tcp_endpoint();
      ASSERT_TRUE(tcp.ok()) << tcp.status();
      endpoint_of_second = *tcp;
    }
    second_ = StartRank(1, 2, endpoint_of_second);
    ASSERT_NE(second_, nullptr);
    ASSERT_TRUE(second_->Send("load").ok());
    ASSERT_TRUE(Script().Load(*first_).ok());
    ASSERT_TRUE(second_->Receive().ok());
    TakeStep(1);
  }

  void TakeStep(uint64_t step) {
    ASSERT_TRUE(second_->Send(absl::StrCat("step ", step)).ok());
    RunSteps(*first_, step, step);
    const auto answer = second_->Receive();
    ASSERT_TRUE(answer.ok()) << answer.status();
  }

  // Rank 1 dies in this command of step 2, having carried out the others.
  void LoseSecondIn(const std::string& command) {
    if (command == "commit 2") {
      ASSERT_TRUE(second_->Do("push 2").ok());
    }
    ASSERT_TRUE(second_->Send(command).ok());
    ASSERT_TRUE(second_->Kill().ok());
    AwaitFreed(alone_);
  }

  // Rank 1 dies in step 2, having pushed, and so do those that would have seen
  // it.
  void LoseSecondWithEngine(bool and_daemon) {
    const StepScript::Step step = Script().Make(2);
    ASSERT_TRUE(StepScript::Push(*first_, step).ok());
    ASSERT_TRUE(first_->CommitStart(step.commit).ok());
    ASSERT_TRUE(second_->Do("push 2").ok());
    const pid_t first_engine = engine();
    // The engine is stopped so that it sees nothing.
    ASSERT_EQ(kill(first_engine, SIGSTOP), 0);
    const absl::Status stopped = crash::PollUntil(
        "the stop", [first_engine] { return IsStopped(first_engine); });
    ASSERT_TRUE(stopped.ok()) << stopped;
    ASSERT_TRUE(second_->Kill().ok());
    if (and_daemon) {
      ASSERT_TRUE(daemon_->Kill().ok());
    }
    ASSERT_EQ(kill(first_engine, SIGKILL), 0);
    if (and_daemon) {
      ASSERT_TRUE(daemon_->Restart().ok());
    }
    const auto told = first_->CommitWait();
    EXPECT_EQ(told.status().code(), absl::StatusCode::kAborted)
        << told.status();
    EXPECT_THAT(std::string(told.status().message()),
                HasSubstr("rank 1 lost at step 2"));
    EXPECT_EQ(CountFiles(JobDirectory(), "gradients.1."), 0);
    ReplaceSecond();
    ASSERT_FALSE(HasFatalFailure());
    TakeStep(2);
    ExpectUndisturbed(*first_, 2);
  }

  void ReplaceSecond() {
    second_ = StartRank(1, 2);
    ASSERT_NE(second_, nullptr);
    const auto committed = second_->Do("committed");
    ASSERT_TRUE(committed.ok()) << committed.status();
    EXPECT_EQ(*committed, "1");
  }

  absl::Notification noticed_;  // of the first rank, once
  std::string notice_;
  std::unique_ptr<Session> first_;
  std::unique_ptr<RankProcess> second_;
  Resources alone_;
};

TEST_P(RankLossTest, NothingIsLeftOfIt) {
  Start("wait");
  ASSERT_FALSE(HasFatalFailure());
  for (const char* command : {"push 2", "commit 2", "fetch"}) {
    SCOPED_TRACE(command);
    LoseSecondIn(command);
    ReplaceSecond();
    ASSERT_FALSE(HasFatalFailure());
  }
  TakeStep(2);
  ExpectUndisturbed(*first_, 2);
}

TEST_P(RankLossTest, OthersWait) {
  Start("wait");
  ASSERT_FALSE(HasFatalFailure());
  const StepScript::Step step = Script().Make(2);
  ASSERT_TRUE(StepScript::Push(*first_, step).ok());
  ASSERT_TRUE(first_->CommitStart(step.commit).ok());
  ASSERT_TRUE(second_->Do("push 2").ok());
  absl::StatusOr<client::Outcome> outcome;
  std::jthread waits([&] { outcome = first_->CommitWait(); });
  ASSERT_TRUE(second_->Kill().ok());
  noticed_.WaitForNotification();
  EXPECT_EQ(notice_, "rank 1 lost at step 2, waiting for its return");
  AwaitFreed(alone_);
  ReplaceSecond();
  ASSERT_FALSE(HasFatalFailure());
  const auto answer = second_->Do("step 2");
  ASSERT_TRUE(answer.ok()) << answer.status();
  waits.join();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(TimesLogged("rank 1 lost at step 2"), 1);
  ExpectUndisturbed(*first_, 2);
}

TEST_P(RankLossTest, OthersAreTold) {
  Start("abort");
  ASSERT_FALSE(HasFatalFailure());
  const StepScript::Step step = Script().Make(2);
  ASSERT_TRUE(StepScript::Push(*first_, step).ok());
  ASSERT_TRUE(first_->CommitStart(step.commit).ok());
  ASSERT_TRUE(second_->Do("push 2").ok());
  ASSERT_TRUE(second_->Kill().ok());
  const auto told = first_->CommitWait();
  EXPECT_FALSE(noticed_.HasBeenNotified());
  EXPECT_EQ(told.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(told.status().message()),
              HasSubstr("rank 1 lost at step 2"));
  AwaitFreed(alone_);
  ReplaceSecond();
  ASSERT_FALSE(HasFatalFailure());
  TakeStep(2);
  ExpectUndisturbed(*first_, 2);
}

TEST_P(RankLossTest, OthersAreToldWhenTheEngineDiesToo) {
  Start("abort");
  ASSERT_FALSE(HasFatalFailure());
  LoseSecondWithEngine(/*and_daemon=*/false);
}

TEST_P(RankLossTest, OthersAreToldWhenTheDaemonDiesToo) {
  Start("abort");
  ASSERT_FALSE(HasFatalFailure());
  LoseSecondWithEngine(/*and_daemon=*/true);
}

// No process here can see whether the rank's process still lives.
TEST_P(RankLossTest, OthersAreToldWhenItWasOnAnotherMachine) {
  Start("abort", /*second_over_tcp=*/true);
  ASSERT_FALSE(HasFatalFailure());
  LoseSecondWithEngine(/*and_daemon=*/false);
}

TEST_P(RankLossTest, BothAreLost) {
  StartDaemon();
  ASSERT_FALSE(HasFatalFailure());
  std::unique_ptr<RankProcess> ranks[2];
  const auto start = [&] {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ranks[rank] = StartRank(rank, 2);
      ASSERT_NE(ranks[rank], nullptr);
    }
  };
  const auto both = [&](const std::string& command) {
    for (auto& rank : ranks) ASSERT_TRUE(rank->Send(command).ok());
    for (auto& rank : ranks) {
      const auto answer = rank->Receive();
      ASSERT_TRUE(answer.ok()) << command << ": " << answer.status();
    }
  };
  start();
  ASSERT_FALSE(HasFatalFailure());
  both("load");
  both("step 1");
  AwaitKept(2);
  const Resources attached = Count();
  for (auto& rank : ranks) ASSERT_TRUE(rank->Do("push 2").ok());
  ASSERT_TRUE(ranks[0]->Send("commit 2").ok());
  for (auto& rank : ranks) ASSERT_TRUE(rank->Kill().ok());
  // Each rank has at least its connection.
  Resources less = attached;
  less.engine_fds -= 2;
  if (wire_ == Wire::kShm) {
    less.supervisor_fds -= 2;
    less.engine_memory -= 2;
  } else {
    less.staging_files = 0;
  }
  AwaitFreed(less);
  start();
  ASSERT_FALSE(HasFatalFailure());
  both("step 2");
  ASSERT_TRUE(ranks[0]->Kill().ok());
  const auto session = Open(Options(0, 2));
  ASSERT_NE(session, nullptr);
  ExpectUndisturbed(*session, 2);
}

INSTANTIATE_TEST_SUITE_P(Wires, RankLossTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate::faults
