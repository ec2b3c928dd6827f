#include "server/supervisor/core_shares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace optstate::supervisor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

v1::EngineSettings Weights() {
  v1::EngineSettings settings;
  settings.set_weight(100);
  settings.add_job_weights("heavy=200");
  settings.add_job_weights("light=50");
  return settings;
}

// User 8 has three times the weight of others.
UserWeights Users() {
  return {.of = [](uid_t user) { return user == 8 ? 300u : 100u; },
          .largest = 300};
}

// Starts a process that sleeps, or (`busy`) one that computes for ever.
pid_t Child(bool busy) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    while (true) {
      if (!busy) ::pause();
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
  }
  return pid;
}

void End(pid_t pid) {
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
}

// A fixture with files as in cgroup v2. The kernel creates a child group's
// files by itself, so here they exist beforehand.
class CgroupTest : public testing::Test {
 protected:
  ~CgroupTest() override { std::filesystem::remove_all(root_); }
  void Make(const std::string& own, const std::string& controllers) {
    Write("/proc/self/cgroup", "5:memory:/other\n0::" + own + "\n");
    group_ = own == "/" ? "" : own;
    Write(InGroup("cgroup.controllers"), controllers + "\n");
    for (const char* file : {"cgroup.type", "cgroup.subtree_control"}) {
      Write(InGroup(file), "");
    }
    for (const char* child :
         {"optstate.probe", "optstate.user-7", "optstate.user-7/optstate-heavy",
          "optstate.user-7/optstate-other", "optstate.user-8",
          "optstate.user-8/optstate-light"}) {
      for (const char* file : {"cgroup.type", "cpu.weight", "cgroup.procs",
                               "cgroup.subtree_control"}) {
        Write(InGroup(absl::StrCat(child, "/", file)), "");
      }
    }
  }
  std::string InGroup(const std::string& file) const {
    return absl::StrCat("/sys/fs/cgroup", group_, "/", file);
  }
  std::string Read(const std::string& file) const {
    std::ifstream stream(root_ + InGroup(file));
    std::string text;
    std::getline(stream, text);
    return text;
  }
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const std::string root_ =
      testing::TempDir() + "/cgroup." + std::to_string(::getpid());
  std::string group_;
};

TEST_F(CgroupTest, UsersHaveGroupsWithTheirJobsBelow) {
  Make("/", "cpu");
  CoreShares shares = CoreShares::Find(Weights(), Users(), root_);
  EXPECT_EQ(shares.description(),
            "cgroup v2 cpu.weight below " + root_ + "/sys/fs/cgroup");
  for (const auto& [job, owner, pid] :
       {std::tuple("heavy", 7, 77), std::tuple("other", 7, 78),
        std::tuple("light", 8, 79)}) {
    const absl::Status applied =
        shares.Apply(job, static_cast<uid_t>(owner), pid);
    ASSERT_TRUE(applied.ok()) << applied;
  }
  EXPECT_EQ(Read("optstate.user-7/cpu.weight"), "100");
  EXPECT_EQ(Read("optstate.user-8/cpu.weight"), "300");
  EXPECT_EQ(Read("optstate.user-7/optstate-heavy/cpu.weight"), "200");
  EXPECT_EQ(Read("optstate.user-7/optstate-heavy/cgroup.procs"), "77");
  EXPECT_EQ(Read("optstate.user-7/optstate-other/cpu.weight"), "100");
  EXPECT_EQ(Read("optstate.user-8/optstate-light/cpu.weight"), "50");
  EXPECT_EQ(Read("optstate.user-8/optstate-light/cgroup.procs"), "79");
}

TEST_F(CgroupTest, GroupsGoWithTheirEngines) {
  Make("/", "cpu");
  CoreShares shares = CoreShares::Find(Weights(), Users(), root_);
  const std::string user = root_ + InGroup("optstate.user-7");
  for (const char* job : {"heavy", "other"}) {
    ASSERT_TRUE(shares.Apply(job, 7, 77).ok());
    // As the kernel has it: a group's files do not keep it.
    const std::string group = absl::StrCat(user, "/optstate-", job);
    std::filesystem::remove_all(group);
    ASSERT_EQ(::mkdir(group.c_str(), 0755), 0);
  }
  for (const char* file : {"cgroup.type", "cpu.weight", "cgroup.procs",
                           "cgroup.subtree_control"}) {
    std::filesystem::remove(absl::StrCat(user, "/", file));
  }
  EXPECT_TRUE(shares.Forget("heavy").ok());
  EXPECT_FALSE(std::filesystem::exists(user + "/optstate-heavy"));
  EXPECT_TRUE(std::filesystem::exists(user + "/optstate-other"));
  EXPECT_TRUE(shares.Forget("other").ok());
  EXPECT_FALSE(std::filesystem::exists(user));
  EXPECT_TRUE(shares.Forget("other").ok());
}

// A daemon of a former build had jobs' groups beside each other.
TEST_F(CgroupTest, TheGroupThatAnEngineHadBeforeIsRemoved) {
  Make("/", "cpu");
  CoreShares shares = CoreShares::Find(Weights(), Users(), root_);
  const std::string former = root_ + InGroup("optstate-heavy");
  ASSERT_EQ(::mkdir(former.c_str(), 0755), 0);
  ASSERT_TRUE(shares.Apply("heavy", 7, 77).ok());
  EXPECT_FALSE(std::filesystem::exists(former));
}

TEST_F(CgroupTest, WithoutAGroupNiceValuesAreUsedAndTheReasonIsSaid) {
  Make("/", "cpuset io");
  EXPECT_THAT(CoreShares::Find(Weights(), {}, root_).description(),
              AllOf(StartsWith("nice values"),
                    HasSubstr("the group / has no cpu controller")));
}

class NiceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (own_ + 6 > 19) GTEST_SKIP() << "no nice value is left above " << own_;
  }
  static int NiceOf(pid_t pid) { return ::getpriority(PRIO_PROCESS, pid); }

  const std::string no_cgroup_ = "/nowhere";
  const int own_ = ::getpriority(PRIO_PROCESS, 0);
};

TEST_F(NiceTest, EveryThreadGetsTheValueOfTheWeight) {
  CoreShares shares = CoreShares::Find(Weights(), {}, no_cgroup_);
  EXPECT_EQ(::getpriority(PRIO_PROCESS, 0), own_);
  EXPECT_EQ(shares.NiceOf("light") - shares.NiceOf("heavy"), 6);
  const pid_t child = Child(false);
  const absl::Status applied = shares.Apply("light", 7, child);
  EXPECT_TRUE(applied.ok()) << applied;
  EXPECT_EQ(NiceOf(child), shares.NiceOf("light"));
  EXPECT_GT(NiceOf(child), own_);
  End(child);
  EXPECT_FALSE(shares.Apply("light", 7, child).ok());
}

// With the right to raise priorities, weight 100 gets the daemon's nice value;
// without it the heaviest weight does.
TEST_F(NiceTest, WithoutPrivilegeOthersAreLowered) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to be able to lose it";
  EXPECT_EQ(CoreShares::Find(Weights(), {}, no_cgroup_).NiceOf("other"), own_);
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit none = {0, 0};
    ::setrlimit(RLIMIT_NICE, &none);
    if (::setresuid(65534, 65534, 65534) != 0) ::_exit(1);
    CoreShares shares = CoreShares::Find(Weights(), {}, no_cgroup_);
    if (shares.NiceOf("heavy") != own_) ::_exit(2);
    if (shares.NiceOf("other") != own_ + 3) ::_exit(3);
    if (shares.NiceOf("light") != own_ + 6) ::_exit(4);
    if (shares.description().find("all of them lowered") == std::string::npos) {
      ::_exit(5);
    }
    if (!shares.Apply("light", 7, ::getpid()).ok()) ::_exit(6);
    if (NiceOf(::getpid()) != own_ + 6) ::_exit(7);
    // No weight is above 100: nothing has to be raised.
    v1::EngineSettings plain;
    plain.set_weight(100);
    ::_exit(CoreShares::Find(plain, {}, no_cgroup_).NiceOf("a") == own_ + 6
                ? 0
                : 8);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "exit status " << WEXITSTATUS(status);
}

// Two jobs of one user have half of what the job of another has, each; when the
// other ends, they have all of it again.
TEST_F(NiceTest, AUsersJobsDivideItsPart) {
  v1::EngineSettings plain;
  plain.set_weight(100);
  CoreShares shares = CoreShares::Find(plain, {}, no_cgroup_);
  if (shares.description().find("none of which may be raised") !=
      std::string::npos) {
    GTEST_SKIP() << "this process may not raise priorities";
  }
  const pid_t first = Child(false);
  const pid_t second = Child(false);
  const pid_t other = Child(false);
  EXPECT_TRUE(shares.Apply("first", 7, first).ok());
  EXPECT_EQ(NiceOf(first), own_);
  EXPECT_TRUE(shares.Apply("other", 8, other).ok());
  EXPECT_EQ(NiceOf(first), own_);
  EXPECT_EQ(NiceOf(other), own_);
  EXPECT_TRUE(shares.Apply("second", 7, second).ok());
  // 75, 75 and 150 of 300.
  EXPECT_EQ(NiceOf(first), own_ + 1);
  EXPECT_EQ(NiceOf(second), own_ + 1);
  EXPECT_EQ(NiceOf(other), own_ - 2);
  End(other);
  EXPECT_TRUE(shares.Forget("other").ok());
  EXPECT_EQ(NiceOf(first), own_);
  EXPECT_EQ(NiceOf(second), own_);
  End(first);
  End(second);
}

TEST_F(NiceTest, AnEngineThatHasJustEndedIsNoFault) {
  v1::EngineSettings plain;
  plain.set_weight(100);
  CoreShares shares = CoreShares::Find(plain, {}, no_cgroup_);
  const pid_t gone = Child(false);
  const pid_t other = Child(false);
  EXPECT_TRUE(shares.Apply("gone", 7, gone).ok());
  End(gone);
  const absl::Status applied = shares.Apply("other", 8, other);
  EXPECT_TRUE(applied.ok()) << applied;
  EXPECT_TRUE(shares.Apply("third", 8, other).ok());
  End(other);
}

TEST_F(NiceTest, WithoutPrivilegeTheWeightOfTheUserCounts) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to be able to lose it";
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit none = {0, 0};
    ::setrlimit(RLIMIT_NICE, &none);
    if (::setresuid(65534, 65534, 65534) != 0) ::_exit(1);
    v1::EngineSettings plain;
    plain.set_weight(100);
    const CoreShares shares = CoreShares::Find(plain, Users(), no_cgroup_);
    if (shares.NiceOf("a", 8) != own_) ::_exit(2);
    if (shares.NiceOf("a", 7) != own_ + 5) ::_exit(3);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "exit status " << WEXITSTATUS(status);
}

// On one core, a job of four times the weight is given more time.
TEST_F(NiceTest, TheKernelGivesTheHeavierMoreTime) {
  CoreShares shares = CoreShares::Find(Weights(), {}, no_cgroup_);
  const pid_t heavy = Child(true);
  const pid_t light = Child(true);
  cpu_set_t one;
  CPU_ZERO(&one);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(one), &one), 0);
  int cpu = 0;
  while (!CPU_ISSET(static_cast<size_t>(cpu), &one)) ++cpu;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(cpu), &one);
  for (const pid_t pid : {heavy, light}) {
    EXPECT_EQ(::sched_setaffinity(pid, sizeof(one), &one), 0);
  }
  EXPECT_TRUE(shares.Apply("heavy", 7, heavy).ok());
  EXPECT_TRUE(shares.Apply("light", 7, light).ok());
  // The first process ends itself after one second of the core.
  const rlimit one_second = {1, 1};
  ASSERT_EQ(::prlimit(heavy, RLIMIT_CPU, &one_second, nullptr), 0);
  rusage usage = {};
  double seconds[2] = {0, 0};
  const pid_t pids[] = {heavy, light};
  for (int i = 0; i < 2; ++i) {
    if (pids[i] == light) ::kill(light, SIGKILL);
    ::wait4(pids[i], nullptr, 0, &usage);
    seconds[i] = static_cast<double>(usage.ru_utime.tv_sec) +
                 1e-6 * static_cast<double>(usage.ru_utime.tv_usec);
  }
  RecordProperty("ratio", absl::StrCat(seconds[0] / seconds[1]));
  EXPECT_GT(seconds[0], 1.5 * seconds[1]);
}

}  // namespace
}  // namespace optstate::supervisor
