// Jobs that go to sleep and wake, with the process killed, and each operation
// failing, at every point in between.

#include "server/supervisor/sleep/job_sleeper.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/supervisor/sleep/sleep_manifest.h"
#include "storage/disk_folder.h"
#include "storage/state_folder.h"

namespace optstate::supervisor {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr uint64_t kSparseBytes = uint64_t{4} << 20;
constexpr uint64_t kReservedBytes = uint64_t{1} << 20;

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(fs::file_size(path), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  return text;
}

void WriteFile(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

uint64_t AllocatedBytes(const fs::path& path) {
  struct stat info = {};
  EXPECT_EQ(::stat(path.c_str(), &info), 0) << path;
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

absl::Status Admit(const v1::SleepManifest& /*manifest*/,
                   absl::FunctionRef<absl::Status()> reserve) {
  return reserve();
}
absl::Status Synced() { return absl::OkStatus(); }

class JobSleeperTest : public testing::Test {
 protected:
  JobSleeperTest() {
    // The job is in memory, where the machine has a tmpfs; the disk is not.
    const std::string memory =
        ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir();
    memory_ = Make(memory + "/job_sleeper-XXXXXX");
    disk_ = Make(testing::TempDir() + "/job_sleeper-XXXXXX");
    place_ = {.job = "gpt",
              .uid = 7,
              .job_directory = memory_ + "/gpt",
              .folder = disk_ + "/gpt"};
    MakeJob();
  }
  ~JobSleeperTest() override {
    fs::remove_all(memory_);
    fs::remove_all(disk_);
  }

  static std::string Make(std::string path) {
    EXPECT_NE(::mkdtemp(path.data()), nullptr);
    return path;
  }

  void MakeJob() {
    fs::remove_all(place_.job_directory);
    fs::create_directories(place_.job_directory + "/state/sub");
    WriteFile(place_.job_directory + "/owner", "7\n");
    WriteFile(place_.job_directory + "/lock", "1\n");
    WriteFile(place_.job_directory + storage::kBootFile, Boot());
    WriteFile(place_.job_directory + "/state/control", "control");
    WriteFile(place_.job_directory + "/state/empty", "");
    WriteFile(place_.job_directory + "/state/sub/array",
              std::string(300'000, 'x'));
    const std::string sparse = place_.job_directory + "/state/sparse";
    WriteFile(sparse, "begin");
    fs::resize_file(sparse, kSparseBytes);
    {
      std::fstream file(sparse, std::ios::in | std::ios::out);
      file.seekp(kSparseBytes / 2);
      file << "middle";
    }
    const std::string reserved = place_.job_directory + "/state/reserved";
    WriteFile(reserved, "data");
    const int fd = ::open(reserved.c_str(), O_RDWR);
    EXPECT_EQ(::posix_fallocate(fd, 0, kReservedBytes), 0);
    ::close(fd);
    before_ = Files();
  }

  static std::string Boot() { return storage::ReadBootId().value_or("boot"); }

  // Returns the content of all files that are the job's.
  std::map<std::string, std::string> Files() const {
    std::map<std::string, std::string> files;
    for (const auto& entry :
         fs::recursive_directory_iterator(place_.job_directory)) {
      const std::string path = entry.path().string();
      if (entry.is_regular_file() && !absl::EndsWith(path, "/lock")) {
        files[path.substr(place_.job_directory.size())] = ReadFile(path);
      }
    }
    return files;
  }

  bool IsMarked() const {
    return fs::exists(place_.job_directory + kAsleepFile);
  }
  void ExpectAwake() const {
    EXPECT_FALSE(IsAsleep(place_));
    EXPECT_EQ(Files(), before_);
    EXPECT_FALSE(fs::exists(place_.folder));
  }
  // Does as a start of the daemon does.
  std::string Settle() {
    CopyControl control;
    const auto folder = SettleSleep(place_, &control);
    EXPECT_TRUE(folder.ok()) << folder.status();
    return folder.value_or("?");
  }
  // Does as a start of the daemon does after the memory is lost.
  void LoseMemory() const {
    fs::remove_all(place_.job_directory);
    fs::create_directories(place_.job_directory);
    WriteFile(place_.job_directory + "/owner", "7\n");
    if (fs::exists(place_.folder)) {
      ASSERT_TRUE(MarkAsleep(place_.job_directory, place_.folder).ok());
    }
  }
  absl::Status Sleep(CopyControl* control) const {
    return PutToSleep(place_, Synced, control).status();
  }
  absl::Status WakeUp(CopyControl* control) const {
    return Wake(place_, Admit, control);
  }
  void MustSleep() {
    CopyControl control;
    const absl::Status slept = Sleep(&control);
    ASSERT_TRUE(slept.ok()) << slept;
  }
  void MustWake() {
    CopyControl control;
    const absl::Status woken = WakeUp(&control);
    ASSERT_TRUE(woken.ok()) << woken;
    ExpectAwake();
  }

  // Runs `act` in a process that is killed before the operation of this number;
  // returns whether it came to that.
  template <typename Act>
  bool KilledAt(int number, const Act& act) {
    const pid_t child = ::fork();
    if (child == 0) {
      CopyControl control;
      control.before = [number, n = 0](absl::string_view,
                                       absl::string_view) mutable {
        if (n++ == number) ::raise(SIGKILL);
        return absl::OkStatus();
      };
      ::_exit(act(&control).ok() ? 0 : 1);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) return true;
    EXPECT_EQ(WEXITSTATUS(status), 0);
    return false;
  }

  std::string memory_;
  std::string disk_;
  SleepPlace place_;
  std::map<std::string, std::string> before_;
};

TEST_F(JobSleeperTest, MemoryIsGivenBackAndComesBackBitEqual) {
  const uint64_t reserved =
      AllocatedBytes(place_.job_directory + "/state/reserved");
  CopyControl control;
  const auto manifest = PutToSleep(place_, Synced, &control);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_TRUE(IsAsleep(place_));
  EXPECT_EQ(control.bytes, control.bytes_total);
  EXPECT_EQ(control.bytes, DiskBytes(*manifest));
  EXPECT_LT(DiskBytes(*manifest), kSparseBytes);
  EXPECT_EQ(ReadFile(place_.job_directory + kAsleepFile), place_.folder);
  EXPECT_EQ(Files().size(), 2u);  // owner and asleep
  // The holes take no room on the disk.
  EXPECT_LT(AllocatedBytes(place_.folder + kFilesFolder + "/state/sparse"),
            kSparseBytes / 2);
  EXPECT_FALSE(fs::exists(place_.folder + kFilesFolder + "/lock"));
  MustWake();
  EXPECT_LT(AllocatedBytes(place_.job_directory + "/state/sparse"),
            kSparseBytes / 2);
  // Memory that was reserved and never written has its memory again.
  EXPECT_GE(AllocatedBytes(place_.job_directory + "/state/reserved"), reserved);
}

TEST_F(JobSleeperTest, AKillOnTheWayToSleepLeavesTheJobAwakeOrAsleep) {
  int asleep = 0;
  int awake = 0;
  for (int n = 0;; ++n) {
    SCOPED_TRACE(absl::StrCat("killed before operation ", n));
    const bool killed =
        KilledAt(n, [this](CopyControl* control) { return Sleep(control); });
    const bool marked = IsMarked();
    const std::string folder = Settle();
    EXPECT_EQ(folder.empty(), !marked);
    if (folder.empty()) {
      ++awake;
      ExpectAwake();
    } else {
      ++asleep;
      EXPECT_EQ(folder, place_.folder);
      EXPECT_EQ(Files().size(), 2u);
      MustWake();
    }
    if (HasFailure()) return;
    fs::remove_all(disk_ + "/.old-gpt");
    MakeJob();
    if (!killed) break;
  }
  EXPECT_GT(awake, 10);
  EXPECT_GT(asleep, 3);
}

// Where the memory is lost too, the job is there again if its folder was
// complete, and nothing else is taken for it.
TEST_F(JobSleeperTest, ARebootOnTheWayToSleepFindsAWholeFolderOrNone) {
  int found = 0;
  for (int n = 0;; ++n) {
    SCOPED_TRACE(absl::StrCat("power lost before operation ", n));
    const bool killed =
        KilledAt(n, [this](CopyControl* control) { return Sleep(control); });
    LoseMemory();
    if (fs::exists(place_.folder)) {
      ++found;
      EXPECT_EQ(Settle(), place_.folder);
      MustWake();
    }
    if (HasFailure()) return;
    fs::remove_all(place_.folder);
    MakeJob();
    if (!killed) break;
  }
  EXPECT_GT(found, 3);
}

TEST_F(JobSleeperTest, AKillWhileItWakesLeavesTheJobAwakeOrAsleep) {
  int asleep = 0;
  int awake = 0;
  for (int n = 0;; ++n) {
    SCOPED_TRACE(absl::StrCat("killed before operation ", n));
    MustSleep();
    if (HasFailure()) return;
    const bool killed =
        KilledAt(n, [this](CopyControl* control) { return WakeUp(control); });
    const bool marked = IsMarked();
    const std::string folder = Settle();
    EXPECT_EQ(folder.empty(), !marked);
    if (folder.empty()) {
      ++awake;
      ExpectAwake();
    } else {
      ++asleep;
      EXPECT_EQ(Files().size(), 2u);
      MustWake();
    }
    if (HasFailure()) return;
    if (!killed) break;
  }
  EXPECT_GT(asleep, 10);
  EXPECT_GT(awake, 1);
}

TEST_F(JobSleeperTest, ARebootWhileItWakesFindsTheFolderUntilItIsGivenUp) {
  int found = 0;
  for (int n = 0;; ++n) {
    SCOPED_TRACE(absl::StrCat("power lost before operation ", n));
    MustSleep();
    if (HasFailure()) return;
    const bool killed =
        KilledAt(n, [this](CopyControl* control) { return WakeUp(control); });
    LoseMemory();
    // Until the folder is given up no engine runs.
    EXPECT_EQ(fs::exists(place_.folder), killed);
    if (fs::exists(place_.folder)) {
      ++found;
      EXPECT_EQ(Settle(), place_.folder);
      MustWake();
    }
    if (HasFailure()) return;
    MakeJob();
    if (!killed) break;
  }
  EXPECT_GT(found, 10);
}

// An operation that fails leaves the job as it was, unless it is past the point
// at which the job is asleep.
TEST_F(JobSleeperTest, AnErrorOnTheWayToSleepLeavesTheJobAwake) {
  for (int n = 0;; ++n) {
    SCOPED_TRACE(absl::StrCat("operation ", n, " fails"));
    CopyControl control;
    control.before = [n, i = 0](absl::string_view operation,
                                absl::string_view) mutable {
      return i++ == n ? absl::ResourceExhaustedError(operation)
                      : absl::OkStatus();
    };
    const absl::Status slept = Sleep(&control);
    if (slept.ok()) break;
    EXPECT_TRUE(absl::IsResourceExhausted(slept)) << slept;
    EXPECT_FALSE(fs::exists(disk_ + "/.new-gpt"));
    if (IsAsleep(place_)) {
      EXPECT_THAT(std::string(slept.message()), HasSubstr("is asleep"));
      EXPECT_EQ(Settle(), place_.folder);
      MustWake();
    } else {
      ExpectAwake();
    }
    if (HasFailure()) return;
    fs::remove_all(disk_ + "/.old-gpt");
    MakeJob();
  }
}

TEST_F(JobSleeperTest, AnErrorWhileItWakesLeavesTheJobAsleep) {
  MustSleep();
  int failures = 0;
  for (int n = 0;; ++n) {
    SCOPED_TRACE(absl::StrCat("operation ", n, " fails"));
    CopyControl control;
    control.before = [n, i = 0](absl::string_view operation,
                                absl::string_view) mutable {
      return i++ == n ? absl::ResourceExhaustedError(operation)
                      : absl::OkStatus();
    };
    const absl::Status woken = WakeUp(&control);
    if (woken.ok()) break;
    ++failures;
    EXPECT_TRUE(IsAsleep(place_));
    EXPECT_TRUE(IsMarked());
    EXPECT_EQ(Files().size(), 2u);
    if (HasFailure()) return;
  }
  EXPECT_GT(failures, 10);
  ExpectAwake();
}

TEST_F(JobSleeperTest, DamageIsNamedAndTheJobStaysAsleep) {
  MustSleep();
  const std::string array = place_.folder + kFilesFolder + "/state/sub/array";
  {
    std::fstream file(array, std::ios::in | std::ios::out);
    file.seekp(123'456);
    file << "y";
  }
  CopyControl control;
  const absl::Status damaged = WakeUp(&control);
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_THAT(std::string(damaged.message()), HasSubstr(array));
  EXPECT_TRUE(IsMarked());
  fs::resize_file(array, 17);
  EXPECT_TRUE(absl::IsDataLoss(WakeUp(&control)));
  fs::remove(array);
  const absl::Status missing = WakeUp(&control);
  EXPECT_TRUE(absl::IsDataLoss(missing)) << missing;
  WriteFile(array, std::string(300'000, 'x'));
  MustWake();
}

TEST_F(JobSleeperTest, ADamagedManifestIsNamed) {
  MustSleep();
  const std::string manifest = place_.folder + kManifestFile;
  std::string text = ReadFile(manifest);
  text[text.size() / 2] ^= 1;
  WriteFile(manifest, text);
  CopyControl control;
  const absl::Status damaged = WakeUp(&control);
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_THAT(std::string(damaged.message()), HasSubstr(manifest));
  EXPECT_EQ(Settle(), place_.folder);
}

TEST_F(JobSleeperTest, ADiskThatIsNotMountedIsNamed) {
  MustSleep();
  fs::rename(place_.folder, disk_ + "/elsewhere");
  EXPECT_EQ(Settle(), place_.folder);
  CopyControl control;
  const absl::Status refused = WakeUp(&control);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("mount its disk"));
  fs::rename(disk_ + "/elsewhere", place_.folder);
  MustWake();
}

TEST_F(JobSleeperTest, RefusedMemoryLeavesTheJobAsleep) {
  MustSleep();
  CopyControl control;
  const absl::Status refused = Wake(
      place_,
      [](const v1::SleepManifest& manifest, absl::FunctionRef<absl::Status()>) {
        EXPECT_GE(MemoryBytes(manifest), DiskBytes(manifest));
        return absl::ResourceExhaustedError("no memory");
      },
      &control);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(Files().size(), 2u);
  MustWake();
}

TEST_F(JobSleeperTest, CancellingACopyLeavesTheJobAsItWas) {
  CopyControl control;
  control.cancelled = true;
  EXPECT_TRUE(absl::IsAborted(Sleep(&control)));
  ExpectAwake();
  MustSleep();
  EXPECT_TRUE(absl::IsAborted(WakeUp(&control)));
  EXPECT_EQ(Files().size(), 2u);
  MustWake();
}

// The memory of a machine that was started again is not the job, where the
// state directory outlives that.
TEST_F(JobSleeperTest, MemoryOfAFormerStartGivesWayToTheFolder) {
  if (!storage::ReadBootId().ok()) GTEST_SKIP() << "no boot id here";
  EXPECT_TRUE(KilledAt(0, [this](CopyControl* control) {
    control->before = [](absl::string_view operation, absl::string_view) {
      if (operation == "mark") ::raise(SIGKILL);
      return absl::OkStatus();
    };
    return Sleep(control);
  }));
  WriteFile(place_.job_directory + storage::kBootFile, "former\n");
  WriteFile(place_.job_directory + "/state/control", "torn");
  EXPECT_EQ(Settle(), place_.folder);
  before_[storage::kBootFile] = Boot();
  MustWake();
}

TEST_F(JobSleeperTest, AFolderOfAnotherJobIsLeftAlone) {
  MustSleep();
  // A job of the same name in another state directory.
  SleepPlace other = place_;
  other.job_directory = memory_ + "/other";
  fs::create_directories(other.job_directory);
  CopyControl control;
  const auto folder = SettleSleep(other, &control);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(*folder, "");
  EXPECT_FALSE(IsAsleep(other));
  const absl::Status refused = PutToSleep(other, Synced, &control).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  other.uid = 8;
  EXPECT_TRUE(absl::IsFailedPrecondition(Wake(other, Admit, &control)));
  MustWake();
}

TEST_F(JobSleeperTest, AStrangeFileIsRefused) {
  fs::create_symlink("/etc/passwd", place_.job_directory + "/state/link");
  CopyControl control;
  const absl::Status refused = Sleep(&control);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("/state/link"));
  EXPECT_FALSE(fs::exists(disk_ + "/.new-gpt"));
}

}  // namespace
}  // namespace optstate::supervisor
