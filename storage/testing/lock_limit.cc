#include "storage/testing/lock_limit.h"

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

bool DropLockCapability() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3] = {};
  if (::syscall(SYS_capget, &header, sets) != 0) return false;
  sets[0].effective &= ~(1u << CAP_IPC_LOCK);
  sets[0].permitted &= ~(1u << CAP_IPC_LOCK);
  return ::syscall(SYS_capset, &header, sets) == 0;
}

}  // namespace

bool PassesWithLockLimit(uint64_t bytes, const std::function<void()>& part) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit = {bytes, bytes};
    EXPECT_EQ(::setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    EXPECT_TRUE(DropLockCapability());
    part();
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace optstate::storage
