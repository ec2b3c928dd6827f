// Tests of io_uring alone: pinned memory, sleep in the kernel, refusals.

#include "storage/io/io_uring_io_engine.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "proto/types/unique_fd.h"

namespace optstate::io {
namespace {

class IoUringIoEngineTest : public testing::Test {
 protected:
  IoUringIoEngineTest() : folder_(testing::TempDir() + "/io_uring_XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
    options_.log = [this](const std::string& text) { log_.push_back(text); };
  }
  ~IoUringIoEngineTest() override {
    engine_ = nullptr;
    std::filesystem::remove_all(folder_);
  }
  void SetUp() override {
    auto engine = MakeIoUringIoEngine(options_);
    if (!engine.ok()) GTEST_SKIP() << engine.status();
    engine_ = *std::move(engine);
  }
  size_t Poll(bool wait) {
    std::array<IoRequest*, 4> completed;
    return engine_->Poll(absl::MakeSpan(completed), wait);
  }
  static IoRequest Request(IoRequest::Kind kind, FileId file, uint64_t offset,
                           absl::Span<std::byte> buffer) {
    IoRequest request;
    request.kind = kind;
    request.file = file;
    request.offset_bytes = offset;
    request.buffer = buffer;
    return request;
  }

  std::string folder_;
  std::vector<std::string> log_;
  IoEngineOptions options_;
  std::unique_ptr<IoEngine> engine_;
};

// Nothing of the FIFO can be read, so that the only thing that ends the sleep
// is the eventfd.
TEST_F(IoUringIoEngineTest, WakeEndsASleepInTheKernel) {
  const std::string path = folder_ + "/fifo";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const auto file = engine_->Open(path, 0, IoEngine::OpenMode::kOpen);
  ASSERT_TRUE(file.ok()) << file.status();
  alignas(kSectorBytes) static std::array<std::byte, kSectorBytes> buffer;
  IoRequest request =
      Request(IoRequest::Kind::kRead, *file, 0, absl::MakeSpan(buffer));
  engine_->Submit(&request);
  for (int i = 0; i < 200; ++i) {
    std::thread waker([this] { engine_->Wake(); });
    EXPECT_EQ(Poll(/*wait=*/true), 0);
    waker.join();
  }
  EXPECT_EQ(engine_->in_flight(), 1);
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::write(fd.get(), buffer.data(), buffer.size()), buffer.size());
  EXPECT_EQ(Poll(/*wait=*/true), 1);
  EXPECT_EQ(request.status, absl::OkStatus());
}

// A thread that ends takes its calls in the ring with it; the next Poll() makes
// them anew.
TEST_F(IoUringIoEngineTest, OutlivesTheThreadThatSubmitted) {
  constexpr uint64_t kBytes = uint64_t{8} << 20;
  const auto file =
      engine_->Open(folder_ + "/f", kBytes, IoEngine::OpenMode::kCreate);
  ASSERT_TRUE(file.ok()) << file.status();
  alignas(kSectorBytes) static std::array<std::byte, kBytes> buffer;
  for (int i = 0; i < 50; ++i) {
    std::array<IoRequest, 3> requests = {
        Request(IoRequest::Kind::kWrite, *file, 0,
                absl::MakeSpan(buffer).first(kBytes / 2)),
        Request(IoRequest::Kind::kRead, *file, kBytes / 2,
                absl::MakeSpan(buffer).subspan(kBytes / 2)),
        Request(IoRequest::Kind::kSync, *file, 0, {})};
    size_t done = 0;
    std::thread([&] {
      for (IoRequest& request : requests) engine_->Submit(&request);
      done += Poll(/*wait=*/false);
    }).join();
    while (done < requests.size()) done += Poll(/*wait=*/true);
    for (const IoRequest& request : requests) {
      EXPECT_EQ(request.status, absl::OkStatus());
    }
  }
}

// A call that surely has not ended when its thread does is made anew as well.
TEST_F(IoUringIoEngineTest, SleepingCallOutlivesTheThreadThatSubmitted) {
  const std::string path = folder_ + "/fifo";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const auto file = engine_->Open(path, 0, IoEngine::OpenMode::kOpen);
  ASSERT_TRUE(file.ok()) << file.status();
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  alignas(kSectorBytes) static std::array<std::byte, kSectorBytes> buffer;
  for (int i = 0; i < 20; ++i) {
    IoRequest request =
        Request(IoRequest::Kind::kRead, *file, 0, absl::MakeSpan(buffer));
    std::thread([&] {
      engine_->Submit(&request);
      EXPECT_EQ(Poll(/*wait=*/false), 0);
    }).join();
    std::thread waker([this] { engine_->Wake(); });
    EXPECT_EQ(Poll(/*wait=*/true), 0);
    waker.join();
    ASSERT_EQ(::write(fd.get(), buffer.data(), buffer.size()), buffer.size());
    EXPECT_EQ(Poll(/*wait=*/true), 1);
    EXPECT_EQ(request.status, absl::OkStatus());
  }
}

// The ring has a reference of its own. A lease for writing is granted to the
// only opening of a file.
TEST_F(IoUringIoEngineTest, ClosedFileLeavesTheRing) {
  const std::string path = folder_ + "/f";
  const auto file =
      engine_->Open(path, kSectorBytes, IoEngine::OpenMode::kCreate);
  ASSERT_TRUE(file.ok()) << file.status();
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (::fcntl(fd.get(), F_SETLEASE, F_WRLCK) == 0 || errno != EAGAIN) {
    GTEST_SKIP() << "this file system has no leases";
  }
  engine_->Close(*file);
  // Older kernels let go a moment later.
  while (::fcntl(fd.get(), F_SETLEASE, F_WRLCK) != 0) {
    ASSERT_EQ(errno, EAGAIN);
    Poll(/*wait=*/false);
  }
}

// The writes of a killed process are over when its lock is: nothing changes the
// file after Open(), nor an extent after OpenExtent().
class KilledProcessTest : public IoUringIoEngineTest,
                          public testing::WithParamInterface<bool> {
 protected:
  // Opens the file, or the part of it that is an extent.
  static absl::StatusOr<FileId> Open(IoEngine* engine, const std::string& path,
                                     uint64_t bytes) {
    return GetParam() ? engine->OpenExtent(path, {0, bytes})
                      : engine->Open(path, bytes, IoEngine::OpenMode::kOpen);
  }
};

TEST_P(KilledProcessTest, LockOutlastsItsRequests) {
  constexpr uint64_t kBytes = uint64_t{16} << 20;
  const std::string path = folder_ + "/f";
  alignas(kSectorBytes) static std::array<std::byte, kBytes> buffer;
  const auto created = engine_->Open(path, kBytes, IoEngine::OpenMode::kCreate);
  ASSERT_TRUE(created.ok()) << created.status();
  engine_->Close(*created);
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto engine = MakeIoUringIoEngine(options_);
    const auto file = Open(engine->get(), path, kBytes);
    if (!file.ok()) ::_exit(1);
    std::vector<IoRequest> requests(16);
    std::array<IoRequest*, 16> completed;
    for (unsigned char value = 1;; ++value) {
      for (size_t i = 0; i < requests.size(); ++i) {
        const auto part =
            absl::MakeSpan(buffer).subspan(i << 20, uint64_t{1} << 20);
        std::memset(part.data(), value, part.size());
        requests[i] = Request(IoRequest::Kind::kWrite, *file, i << 20, part);
        (*engine)->Submit(&requests[i]);
      }
      (*engine)->Poll(absl::MakeSpan(completed), false);
      if (value == 3 && ::write(ready[1], &value, 1) != 1) ::_exit(1);
      while ((*engine)->in_flight() > 0) {
        (*engine)->Poll(absl::MakeSpan(completed), true);
      }
    }
  }
  ::close(ready[1]);
  char value = 0;
  ASSERT_EQ(::read(ready[0], &value, 1), 1);
  ::close(ready[0]);
  ::kill(child, SIGKILL);
  options_.lock_wait = absl::InfiniteDuration();
  auto engine = MakeIoUringIoEngine(options_);
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  const auto file = Open(engine_.get(), path, kBytes);
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<std::byte> first;
  for (int i = 0; i < 10; ++i) {
    IoRequest read =
        Request(IoRequest::Kind::kRead, *file, 0, absl::MakeSpan(buffer));
    engine_->Submit(&read);
    while (Poll(/*wait=*/true) == 0) {
    }
    ASSERT_EQ(read.status, absl::OkStatus());
    if (i == 0) first.assign(buffer.begin(), buffer.end());
    EXPECT_EQ(absl::MakeConstSpan(buffer), absl::MakeConstSpan(first));
  }
  ::waitpid(child, nullptr, 0);
}

INSTANTIATE_TEST_SUITE_P(FilesAndExtents, KilledProcessTest, testing::Bool());

// A request across several pieces. The mapping is of tmpfs and shared, as the
// state's is.
TEST_F(IoUringIoEngineTest, RegistersASharedMappingInPieces) {
  constexpr uint64_t kMemoryBytes = 64 * kSectorBytes;
  constexpr uint64_t kBytes = 16 * kSectorBytes;
  options_.registered_piece_bytes = 6 * kSectorBytes;
  auto engine = MakeIoUringIoEngine(options_);
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  const UniqueFd fd(::memfd_create("io_uring_test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fd.get(), kMemoryBytes), 0);
  void* const mapped = ::mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED, fd.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const absl::Span<std::byte> memory(static_cast<std::byte*>(mapped),
                                     kMemoryBytes);
  engine_->RegisterMemory(memory);
  if (!log_.empty()) GTEST_SKIP() << log_[0];
  const auto across = memory.subspan(kMemoryBytes - kBytes);
  for (uint64_t i = 0; i < kBytes; ++i) {
    across[i] = static_cast<std::byte>(i / 512 + i);
  }
  const auto file =
      engine_->Open(folder_ + "/f", kBytes, IoEngine::OpenMode::kCreate);
  ASSERT_TRUE(file.ok()) << file.status();
  IoRequest write = Request(IoRequest::Kind::kWrite, *file, 0, across);
  engine_->Submit(&write);
  while (Poll(/*wait=*/true) == 0) {
  }
  EXPECT_EQ(write.status, absl::OkStatus());
  const auto elsewhere = memory.first(kBytes);
  IoRequest read = Request(IoRequest::Kind::kRead, *file, 0, elsewhere);
  engine_->Submit(&read);
  while (Poll(/*wait=*/true) == 0) {
  }
  EXPECT_EQ(read.status, absl::OkStatus());
  EXPECT_EQ(absl::MakeConstSpan(elsewhere), absl::MakeConstSpan(across));
  engine_ = nullptr;
  ::munmap(mapped, kMemoryBytes);
}

// The kernel refuses memory that cannot be written. Requests work without, and
// the log says so once.
TEST_F(IoUringIoEngineTest, WorksWithoutRegisteredMemory) {
  constexpr uint64_t kBytes = 4 * kSectorBytes;
  void* const mapped =
      ::mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const absl::Span<std::byte> memory(static_cast<std::byte*>(mapped), kBytes);
  engine_->RegisterMemory(memory);
  ASSERT_EQ(log_.size(), 1);
  EXPECT_NE(log_[0].find("without registered buffers"), std::string::npos)
      << log_[0];
  ASSERT_EQ(::mprotect(mapped, kBytes, PROT_READ | PROT_WRITE), 0);
  const auto file =
      engine_->Open(folder_ + "/f", kBytes, IoEngine::OpenMode::kCreate);
  ASSERT_TRUE(file.ok()) << file.status();
  std::memset(mapped, 7, kBytes);
  for (const auto kind : {IoRequest::Kind::kWrite, IoRequest::Kind::kRead}) {
    IoRequest request = Request(kind, *file, 0, memory);
    engine_->Submit(&request);
    while (Poll(/*wait=*/true) == 0) {
    }
    EXPECT_EQ(request.status, absl::OkStatus());
    if (kind == IoRequest::Kind::kWrite) std::memset(mapped, 0, kBytes);
  }
  const std::vector<std::byte> sevens(kBytes, std::byte{7});
  EXPECT_EQ(absl::MakeConstSpan(memory), absl::MakeConstSpan(sevens));
  EXPECT_EQ(log_.size(), 1);
  engine_ = nullptr;
  ::munmap(mapped, kBytes);
}

}  // namespace
}  // namespace optstate::io
