// Tests of huge pages that cannot be had.

#include <linux/capability.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/faults/fault_fixture.h"
#include "tests/faults/process_state.h"
#include "tests/faults/small_tmpfs.h"

namespace optstate::faults {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr char kMount[] = "huge_pages: mount\n";

class HugePagesTest : public FaultTest {
 protected:
  void RunJob() {
    const auto session = Open(Options());
    ASSERT_NE(session, nullptr);
    ASSERT_TRUE(Script().Load(*session).ok());
    RunSteps(*session, 1, 2);
    ExpectUndisturbed(*session, 2);
  }
};

TEST_F(HugePagesTest, AutoTakesSmallOnes) {
  auto tmpfs = SmallTmpfs::Mount(uint64_t{8} << 20);
  if (absl::IsFailedPrecondition(tmpfs.status())) {
    GTEST_SKIP() << tmpfs.status();
  }
  ASSERT_TRUE(tmpfs.ok()) << tmpfs.status();
  StartDaemon({.tcp = false,
               .flags = {},
               .config = "huge_pages: auto\n",
               .state_dir = (*tmpfs)->path() + "/state"});
  ASSERT_FALSE(HasFatalFailure());
  RunJob();
  EXPECT_EQ(TimesLogged("4 KiB pages: the tmpfs on " + (*tmpfs)->path() +
                        " has no huge= option"),
            1);
  daemon_.reset();
}

// Where none are left the kernel takes small ones by itself.
TEST_F(HugePagesTest, MountGivesThemWhereTheyCanBeHad) {
  const absl::Status entered = storage::EnterPrivateMounts();
  if (absl::IsFailedPrecondition(entered)) GTEST_SKIP() << entered;
  ASSERT_TRUE(entered.ok()) << entered;
  StartDaemon({.tcp = false, .flags = {}, .config = kMount});
  ASSERT_FALSE(HasFatalFailure());
  RunJob();
  EXPECT_EQ(TimesLogged("huge pages where they can be had"), 1);
}

TEST_F(HugePagesTest, MountWithoutPermissionIsAnError) {
  absl::Status started;
  // A thread's capabilities are its own and its children's.
  std::thread unprivileged([&] {
    prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN);
    started = TestDaemon::Start({.tcp = false, .flags = {}, .config = kMount})
                  .status();
  });
  unprivileged.join();
  EXPECT_THAT(std::string(started.message()),
              AllOf(HasSubstr("huge_pages: mount"),
                    HasSubstr("Operation not permitted")));
}

// Nothing can be written to its files, whether it has pages left or not.
TEST_F(HugePagesTest, HugetlbfsIsAnError) {
  const absl::Status entered = storage::EnterPrivateMounts();
  if (absl::IsFailedPrecondition(entered)) GTEST_SKIP() << entered;
  ASSERT_TRUE(entered.ok()) << entered;
  std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/huge-XXXXXX";
  ASSERT_NE(mkdtemp(path.data()), nullptr);
  if (mount("none", path.c_str(), "hugetlbfs", 0, nullptr) != 0) {
    rmdir(path.c_str());
    GTEST_SKIP() << "no hugetlbfs can be mounted";
  }
  const absl::Status started = TestDaemon::Start({.tcp = false,
                                                  .flags = {},
                                                  .config = "",
                                                  .state_dir = path + "/state"})
                                   .status();
  EXPECT_THAT(std::string(started.message()),
              AllOf(HasSubstr(path + "/state is on a hugetlbfs"),
                    HasSubstr("huge_pages: mount")));
  // The refused daemon has left nothing there.
  EXPECT_EQ(CountFiles(path + "/state", ""), 0);
  umount2(path.c_str(), MNT_DETACH);
  rmdir(path.c_str());
}

TEST_F(HugePagesTest, MountOverJobsIsAnError) {
  std::string state = std::string(std::getenv("TEST_TMPDIR")) + "/jobs-XXXXXX";
  ASSERT_NE(mkdtemp(state.data()), nullptr);
  std::filesystem::create_directory(state + "/jobs");
  const absl::Status started =
      TestDaemon::Start(
          {.tcp = false, .flags = {}, .config = kMount, .state_dir = state})
          .status();
  std::filesystem::remove_all(state);
  EXPECT_THAT(std::string(started.message()),
              AllOf(HasSubstr("huge_pages: mount"), HasSubstr("is not empty")));
}

}  // namespace
}  // namespace optstate::faults
