#include "storage/testing/test_mounts.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>

#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

constexpr int kNotTried = 77;

// Returns 0 when a child that did `prepare` was told that, and why, it cannot
// mount.
int AskInChild(const std::function<bool()>& prepare) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (!prepare()) ::_exit(kNotTried);
    const absl::Status entered = EnterPrivateMounts();
    std::cerr << entered << "\n";
    ::_exit(absl::IsFailedPrecondition(entered) ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

// The error is EINVAL, for "/" is no mount point there.
TEST(TestMountsTest, AChrootCannot) {
  std::string root = ::testing::TempDir() + "/root-XXXXXX";
  ASSERT_NE(::mkdtemp(root.data()), nullptr);
  const int told = AskInChild(
      [&root] { return ::chroot(root.c_str()) == 0 && ::chdir("/") == 0; });
  ::rmdir(root.c_str());
  if (told == kNotTried) GTEST_SKIP() << "needs CAP_SYS_CHROOT";
  EXPECT_EQ(told, 0);
}

// The error is EPERM.
TEST(TestMountsTest, AnUnprivilegedUserCannot) {
  constexpr uid_t kNobody = 65534;
  EXPECT_EQ(
      AskInChild([] { return ::geteuid() != 0 || ::setuid(kNobody) == 0; }), 0);
}

}  // namespace
}  // namespace optstate::storage
