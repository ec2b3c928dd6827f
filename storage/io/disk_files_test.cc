#include "storage/io/disk_files.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "storage/testing/test_mounts.h"

namespace optstate::io {
namespace {

constexpr uint64_t kBytes = uint64_t{1} << 20;

class DiskFilesTest : public testing::Test {
 protected:
  DiskFilesTest() : folder_(testing::TempDir() + "/disk_files_XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
  }
  ~DiskFilesTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const {
    return folder_ + "/" + name;
  }
  std::unique_ptr<DiskFiles> Files(absl::Duration lock_wait) {
    return std::make_unique<DiskFiles>(
        lock_wait, [this](const std::string& text) { log_.push_back(text); });
  }

  std::string folder_;
  std::vector<std::string> log_;
};

TEST_F(DiskFilesTest, CreateReservesAllBlocks) {
  const auto files = Files(absl::ZeroDuration());
  const auto file = files->Open(Path("f"), kBytes, IoEngine::OpenMode::kCreate);
  ASSERT_TRUE(file.ok()) << file.status();
  struct stat info;
  ASSERT_EQ(::fstat(files->Get(*file).fd.get(), &info), 0);
  EXPECT_EQ(info.st_size, kBytes);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, kBytes);
  EXPECT_EQ(info.st_mode & 0777, 0600);
}

TEST_F(DiskFilesTest, BypassesThePageCacheOrSaysOnceThatItCannot) {
  const auto files = Files(absl::ZeroDuration());
  bool direct = false;
  for (const char* name : {"a", "b"}) {
    const auto file =
        files->Open(Path(name), kBytes, IoEngine::OpenMode::kCreate);
    ASSERT_TRUE(file.ok()) << file.status();
    direct = (::fcntl(files->Get(*file).fd.get(), F_GETFL) & O_DIRECT) != 0;
  }
  EXPECT_EQ(log_.size(), direct ? 0 : 1);
}

// The lock of another process ends when that is killed.
TEST_F(DiskFilesTest, KilledProcessLosesItsLock) {
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto files = Files(absl::ZeroDuration());
    const auto file =
        files->Open(Path("f"), kBytes, IoEngine::OpenMode::kCreate);
    const char answer = file.ok() ? 'y' : 'n';
    if (::write(ready[1], &answer, 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char answer = 0;
  ASSERT_EQ(::read(ready[0], &answer, 1), 1);
  ASSERT_EQ(answer, 'y');
  const absl::Status status =
      Files(absl::Milliseconds(20))
          ->Open(Path("f"), kBytes, IoEngine::OpenMode::kOpen)
          .status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  ::kill(child, SIGKILL);
  EXPECT_EQ(Files(absl::InfiniteDuration())
                ->Open(Path("f"), kBytes, IoEngine::OpenMode::kOpen)
                .status(),
            absl::OkStatus());
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

// A thread that opens a file whose lock another DiskFiles holds.
class WaitingTest : public DiskFilesTest {
 protected:
  void SetUp() override {
    const auto file =
        holder_->Open(Path("f"), kBytes, IoEngine::OpenMode::kCreate);
    ASSERT_TRUE(file.ok()) << file.status();
    held_ = *file;
    waiter_ = std::thread([this] {
      status_ = Files(absl::InfiniteDuration())
                    ->Open(Path("f"), kBytes, IoEngine::OpenMode::kOpen)
                    .status();
    });
    // The thread asks for the lock right after it has opened the file.
    while (Openings() < 2) std::this_thread::yield();
  }
  // Ends the lock, and returns what the thread gets.
  absl::Status Release() {
    holder_->Close(held_);
    waiter_.join();
    return status_;
  }

 private:
  // Returns how many of the process's descriptors are of the file.
  int Openings() const {
    int count = 0;
    for (const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      if (std::filesystem::read_symlink(entry.path(), error) == Path("f")) {
        ++count;
      }
    }
    return count;
  }

  std::unique_ptr<DiskFiles> holder_ = Files(absl::ZeroDuration());
  FileId held_;
  std::thread waiter_;
  absl::Status status_;
};

TEST_F(WaitingTest, OpenWaitsForTheLock) {
  EXPECT_EQ(Release(), absl::OkStatus());
}

// The file that the waiting thread has opened has no name any more.
TEST_F(WaitingTest, FileRemovedMeanwhileIsNotFound) {
  EXPECT_EQ(DiskFiles::Remove(Path("f")), absl::OkStatus());
  const absl::Status status = Release();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
}

// A limit of the process stands in for a full disk: it is an error after the
// file has its name.
TEST_F(DiskFilesTest, FailedCreateLeavesNothingBehind) {
  struct rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {.rlim_cur = kBytes / 2,
                               .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status =
      Files(absl::ZeroDuration())
          ->Open(Path("f"), kBytes, IoEngine::OpenMode::kCreate)
          .status();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_FALSE(std::filesystem::exists(Path("f")));
}

TEST_F(DiskFilesTest, FullFileSystem) {
  const absl::Status mounts = storage::EnterPrivateMounts();
  if (!mounts.ok()) GTEST_SKIP() << mounts;
  const auto tmpfs = storage::TestTmpfs::Mount(folder_, "size=1m");
  if (!tmpfs.ok()) GTEST_SKIP() << tmpfs.status();
  const auto files = Files(absl::ZeroDuration());
  EXPECT_EQ(
      files->Open(Path("a"), kBytes / 2, IoEngine::OpenMode::kCreate).status(),
      absl::OkStatus());
  const absl::Status status =
      files->Open(Path("b"), kBytes, IoEngine::OpenMode::kCreate).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("1048576"), std::string::npos) << status;
  EXPECT_NE(status.message().find("524288"), std::string::npos) << status;
  EXPECT_FALSE(std::filesystem::exists(Path("b")));
}

}  // namespace
}  // namespace optstate::io
