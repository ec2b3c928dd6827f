#include "server/supervisor/process_state.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace optstate::supervisor {
namespace {

TEST(ProcessStateTest, TellsTheDeadFromTheLiving) {
  EXPECT_FALSE(IsExiting(::getpid()));
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  EXPECT_FALSE(IsExiting(child));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  siginfo_t info{};
  // Dead, but still there.
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT),
            0);
  EXPECT_TRUE(IsExiting(child));
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(IsExiting(child));
}

}  // namespace
}  // namespace optstate::supervisor
