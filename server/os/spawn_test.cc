#include "server/os/spawn.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace optstate::os {
namespace {

TEST(SpawnTest, NoMoreProcesses) {
  const pid_t child = ::fork();
  if (child == 0) {
    // Root has no limit of processes.
    if (::geteuid() == 0 && ::setuid(4711) != 0) ::_exit(100);
    const rlimit none = {0, 0};
    if (::setrlimit(RLIMIT_NPROC, &none) != 0) ::_exit(101);
    ::_exit(static_cast<int>(Spawn("/bin/true", {"true"}, {}).status().code()));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(static_cast<absl::StatusCode>(WEXITSTATUS(status)),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace optstate::os
