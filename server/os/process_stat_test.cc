#include "server/os/process_stat.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

namespace optstate::os {
namespace {

TEST(ProcessStatTest, TellsTheDyingFromTheLiving) {
  EXPECT_FALSE(ReadProcessStat(::getpid())->is_exiting);
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  EXPECT_FALSE(ReadProcessStat(child)->is_exiting);
  const uint64_t start_ticks = ReadProcessStat(child)->start_ticks;
  EXPECT_TRUE(IsRunning(child, start_ticks));
  EXPECT_TRUE(IsRunning(child, 0));
  EXPECT_FALSE(HasEnded(child, start_ticks));
  EXPECT_FALSE(IsRunning(child, start_ticks + 1)) << "another process";
  EXPECT_TRUE(HasEnded(child, start_ticks + 1));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  siginfo_t info{};
  // The child is dead, but not reaped.
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT),
            0);
  EXPECT_TRUE(ReadProcessStat(child)->is_exiting);
  EXPECT_FALSE(IsRunning(child, start_ticks));
  EXPECT_TRUE(HasEnded(child, start_ticks));
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(ReadProcessStat(child).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_FALSE(IsRunning(child, 0));
  EXPECT_TRUE(HasEnded(child, 0));
}

TEST(ProcessStatTest, StartedBeforeNow) {
  // The name would mislead a parser that takes the first parenthesis for its
  // end.
  ASSERT_EQ(::prctl(PR_SET_NAME, "a) Z 1 2 (b"), 0);
  const ProcessStat ours = *ReadProcessStat(::getpid());
  timespec now{};
  ASSERT_EQ(::clock_gettime(CLOCK_BOOTTIME, &now), 0);
  const auto now_seconds = static_cast<uint64_t>(now.tv_sec) + 1;
  const auto ticks_per_second = static_cast<uint64_t>(::sysconf(_SC_CLK_TCK));
  EXPECT_GT(ours.start_ticks, 0);
  EXPECT_LE(ours.start_ticks, now_seconds * ticks_per_second);
  EXPECT_EQ(ReadProcessStat(::getpid())->start_ticks, ours.start_ticks);
  EXPECT_GE(ours.start_ticks, ReadProcessStat(::getppid())->start_ticks);
}

}  // namespace
}  // namespace optstate::os
