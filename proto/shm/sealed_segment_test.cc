#include "proto/shm/sealed_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/page_reserve.h"

namespace optstate::shm {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kBytes = 3 * 4096 + 100;  // not whole pages
constexpr int kAllSeals =
    F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

SealedSegment CreateOrDie(uint64_t bytes = kBytes) {
  auto segment = SealedSegment::Create("optstate_test", bytes);
  EXPECT_TRUE(segment.ok()) << segment.status();
  return *std::move(segment);
}

UniqueFd Dup(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

// Makes a memfd as a program without our code would.
UniqueFd Memfd(uint64_t bytes, bool populated, int seals) {
  UniqueFd fd(memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  if (populated) {
    EXPECT_EQ(fallocate(fd.get(), 0, 0, bytes), 0);
  }
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

void ExpectRefused(UniqueFd fd, uint64_t bytes, const std::string& reason) {
  const absl::Status status = PeerSegment::Map(std::move(fd), bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
}

// No page is mapped yet, but every page is reserved: the peer accepts the
// segment.
TEST(SealedSegmentTest, ReservedPagesAreItsOwn) {
  constexpr uint64_t kMany = 8 << 20;
  const auto mine = SealedSegment::Create("optstate_test", kMany,
                                          SealedSegment::Pages::kReserved);
  ASSERT_TRUE(mine.ok()) << mine.status();
  struct stat info;
  ASSERT_EQ(fstat(mine->fd(), &info), 0);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, kMany);
  EXPECT_TRUE(PeerSegment::Map(Dup(mine->fd()), kMany).ok());
  std::memset(mine->data(), 0x5a, kMany);
  EXPECT_EQ(SealedSegment::Create("optstate_test", uint64_t{1} << 60,
                                  SealedSegment::Pages::kReserved)
                .status()
                .code(),
            absl::StatusCode::kResourceExhausted);
}

// The rule is in spread_mapping.h. With this size no begin is at a multiple of
// 2 MiB by chance.
TEST(SealedSegmentTest, LargeOnesAreSpread) {
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  const SealedSegment first = CreateOrDie(2 * kMiB + 4096);
  const SealedSegment second = CreateOrDie(2 * kMiB + 4096);
  const auto peers = PeerSegment::Map(Dup(first.fd()), first.size());
  ASSERT_TRUE(peers.ok()) << peers.status();
  std::set<uint64_t> places;
  for (const void* data : {static_cast<const void*>(first.data()),
                           static_cast<const void*>(second.data()),
                           static_cast<const void*>(peers->data())}) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    EXPECT_EQ(address % (2 * kMiB), 0);
    places.insert(address % (256 * kMiB));
  }
  EXPECT_EQ(places.size(), 3);
}

TEST(SealedSegmentTest, WhatIsWrittenIsRead) {
  const SealedSegment mine = CreateOrDie();
  EXPECT_EQ(mine.size(), kBytes);
  for (uint64_t i = 0; i < kBytes; ++i) EXPECT_EQ(mine.data()[i], std::byte{0});
  const auto theirs = PeerSegment::Map(Dup(mine.fd()), kBytes);
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  EXPECT_EQ(theirs->size(), kBytes);
  std::memset(mine.data(), 0xa5, kBytes);
  EXPECT_EQ(std::memcmp(mine.data(), theirs->data(), kBytes), 0);
  EXPECT_EQ(theirs->data()[kBytes - 1], std::byte{0xa5});
}

TEST(SealedSegmentTest, EveryByteHasAPage) {
  const SealedSegment mine = CreateOrDie(8 << 20);
  struct stat info;
  ASSERT_EQ(fstat(mine.fd(), &info), 0);
  EXPECT_EQ(info.st_size, 8 << 20);
  EXPECT_GE(info.st_blocks * 512, 8 << 20);
}

TEST(SealedSegmentTest, NobodyCanMapItForWritingAgain) {
  const SealedSegment mine = CreateOrDie();
  void* data =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, mine.fd(), 0);
  EXPECT_EQ(data, MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
  const auto theirs = PeerSegment::Map(Dup(mine.fd()), kBytes);
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  EXPECT_EQ(mprotect(const_cast<std::byte*>(theirs->data()), kBytes,
                     PROT_READ | PROT_WRITE),
            -1);
  EXPECT_EQ(errno, EACCES);
}

TEST(SealedSegmentTest, NobodyCanWriteResizePunchOrUnsealIt) {
  const SealedSegment mine = CreateOrDie();
  const UniqueFd fd = Dup(mine.fd());
  EXPECT_EQ(write(fd.get(), "x", 1), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(fd.get(), 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(fd.get(), 2 * kBytes), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(
      fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096),
      -1);
  EXPECT_EQ(errno, EPERM);
  // Even the one writable mapping cannot do this.
  EXPECT_EQ(madvise(mine.data(), 4096, MADV_REMOVE), -1);
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
}

// Tries the same through the fd's name in /proc, which opens the file anew.
TEST(SealedSegmentTest, OpeningItAnewGivesNoMore) {
  const SealedSegment mine = CreateOrDie();
  const std::string path = "/proc/self/fd/" + std::to_string(mine.fd());
  const UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.ok()) GTEST_SKIP() << "no /proc here: " << std::strerror(errno);
  EXPECT_EQ(write(fd.get(), "x", 1), -1);
  EXPECT_EQ(mmap(nullptr, kBytes, PROT_WRITE, MAP_SHARED, fd.get(), 0),
            MAP_FAILED);
  EXPECT_EQ(open(path.c_str(), O_RDWR | O_TRUNC | O_CLOEXEC), -1);
}

TEST(SealedSegmentTest, AnotherProcessReadsItAfterTheWriterIsGone) {
  SealedSegment mine = CreateOrDie();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::memset(mine.data(), 7, mine.size());
    _exit(0);
  }
  int exit_status = 0;
  ASSERT_EQ(waitpid(child, &exit_status, 0), child);
  EXPECT_EQ(exit_status, 0);
  UniqueFd fd = Dup(mine.fd());
  mine = SealedSegment();
  const auto theirs = PeerSegment::Map(std::move(fd), kBytes);
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  EXPECT_EQ(theirs->data()[kBytes - 1], std::byte{7});
}

TEST(SealedSegmentTest, MovingLeavesNothingBehind) {
  SealedSegment first = CreateOrDie();
  std::byte* const data = first.data();
  SealedSegment second = std::move(first);
  EXPECT_EQ(second.data(), data);
  // NOLINTNEXTLINE(bugprone-use-after-move): what is tested.
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(first.fd(), -1);
  const int old_fd = second.fd();
  second = CreateOrDie(4096);  // frees its former content
  EXPECT_EQ(second.size(), 4096u);
  EXPECT_NE(second.fd(), old_fd);
  EXPECT_EQ(fcntl(old_fd, F_GETFD), -1);
}

TEST(SealedSegmentTest, RefusesWhatTheMemoryCannotHold) {
  const absl::Status status =
      SealedSegment::Create("too_large", uint64_t{1} << 50).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("too_large"));
}

TEST(SealedSegmentTest, RefusesImpossibleSizes) {
  for (uint64_t bytes : {uint64_t{0}, ~uint64_t{0}}) {
    EXPECT_EQ(SealedSegment::Create("bad", bytes).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(PeerSegmentTest, RefusesAnotherSize) {
  const SealedSegment mine = CreateOrDie();
  ExpectRefused(Dup(mine.fd()), kBytes + 1,
                "expected 12389 bytes, found 12388");
  ExpectRefused(Dup(mine.fd()), kBytes - 1,
                "expected 12387 bytes, found 12388");
  ExpectRefused(Dup(mine.fd()), 0, "cannot have 0 bytes");
}

TEST(PeerSegmentTest, RefusesAMissingSeal) {
  const SealedSegment mine = CreateOrDie();
  for (int seal :
       {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE, F_SEAL_SEAL}) {
    ExpectRefused(Memfd(kBytes, true, kAllSeals & ~seal), kBytes,
                  "expected seals 0x17, found 0x");
  }
  EXPECT_TRUE(PeerSegment::Map(Memfd(kBytes, true, kAllSeals), kBytes).ok());
}

TEST(PeerSegmentTest, RefusesHoles) {
  ExpectRefused(Memfd(1 << 20, false, kAllSeals), 1 << 20,
                "expected 1048576 bytes without holes, found 0 reserved");
  UniqueFd fd(memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 2 << 20), 0);
  ASSERT_EQ(fallocate(fd.get(), 0, 0, 1 << 20), 0);
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, kAllSeals), 0);
  ExpectRefused(std::move(fd), 2 << 20, "without holes");
}

// Blocks behind the end of the file count in st_blocks, but cannot be read.
TEST(PeerSegmentTest, RefusesHolesWithBlocksBehindTheEnd) {
  constexpr uint64_t kMany = 1 << 20;
  for (const uint64_t reserved : {uint64_t{0}, kMany / 2, kMany - 4096}) {
    UniqueFd fd(memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(ftruncate(fd.get(), kMany), 0);
    if (reserved != 0) {
      ASSERT_EQ(fallocate(fd.get(), 0, 0, reserved), 0);
    }
    ASSERT_EQ(fallocate(fd.get(), FALLOC_FL_KEEP_SIZE, kMany, kMany), 0);
    ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, kAllSeals), 0);
    ASSERT_EQ(fcntl(fd.get(), F_GET_SEALS), kAllSeals);
    struct stat info;
    ASSERT_EQ(fstat(fd.get(), &info), 0);
    ASSERT_GE(static_cast<uint64_t>(info.st_blocks) * 512, kMany);
    const absl::Status status = PeerSegment::Map(Dup(fd.get()), kMany).status();
    if (status.ok()) {  // the kernel cannot count
      EXPECT_GE(lseek(fd.get(), 0, SEEK_HOLE), static_cast<off_t>(kMany));
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("without holes"));
  }
}

// Pages that follow: nothing is there until its owner populates it, in spite of
// the seals, and what is mapped partly is checked so far and no further.
TEST(PeerSegmentTest, MayBeMappedBeforeAllPagesAreThere) {
  constexpr uint64_t kMany = 1 << 20;
  constexpr uint64_t kFirst = 64 << 10;
  const auto mine = SealedSegment::Create("optstate_test", kMany,
                                          SealedSegment::Pages::kNone);
  ASSERT_TRUE(mine.ok()) << mine.status();
  EXPECT_EQ(EndOfWritten(mine->fd(), 0, kMany), 0);
  const auto map = [&](uint64_t reserved_bytes) {
    return PeerSegment::MapPartly(Dup(mine->fd()), kMany, reserved_bytes)
        .status();
  };
  EXPECT_EQ(map(4096).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(PopulatePages(mine->data(), kFirst).ok());
  EXPECT_EQ(EndOfWritten(mine->fd(), 0, kMany), kFirst);
  EXPECT_EQ(EndOfWritten(mine->fd(), 4096, kMany), kFirst);
  EXPECT_TRUE(map(kFirst).ok());
  EXPECT_EQ(map(kFirst + 1).code(), absl::StatusCode::kInvalidArgument);
  // A page behind a gap does not count.
  ASSERT_TRUE(PopulatePages(mine->data() + 2 * kFirst, kFirst).ok());
  EXPECT_EQ(EndOfWritten(mine->fd(), 0, kMany), kFirst);
  ASSERT_TRUE(PopulatePages(mine->data(), kMany).ok());
  EXPECT_EQ(EndOfWritten(mine->fd(), 0, kMany), kMany);
  EXPECT_EQ(EndOfWritten(mine->fd(), kMany, kMany), kMany);
  EXPECT_TRUE(PeerSegment::Map(Dup(mine->fd()), kMany).ok());
}

// Writing there would be SIGBUS.
TEST(SealedSegmentTest, PagesThatCannotBeHadAreAnError) {
  const UniqueFd fd = Memfd(4096, /*populated=*/false, F_SEAL_GROW);
  void* const data =
      mmap(nullptr, 2 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(data, MAP_FAILED);
  auto* const bytes = static_cast<std::byte*>(data);
  EXPECT_TRUE(PopulatePages(bytes, 4096).ok());
  EXPECT_EQ(PopulatePages(bytes, 2 * 4096).code(),
            absl::StatusCode::kResourceExhausted);
  munmap(data, 2 * 4096);
}

// hugetlbfs does not say where its holes are, so that nothing counts there.
TEST(PageReserveTest, HugetlbfsSaysNothing) {
  const UniqueFd fd(memfd_create("huge", MFD_CLOEXEC | MFD_HUGETLB));
  if (!fd.ok()) GTEST_SKIP() << "no hugetlbfs: " << std::strerror(errno);
  ASSERT_EQ(ftruncate(fd.get(), 2 << 20), 0);
  EXPECT_EQ(EndOfWritten(fd.get(), 0, 2 << 20), 0);
}

TEST(PageReserveTest, HolesAreFilledWhereTheKernelCannotCount) {
  constexpr uint64_t kMany = 1 << 20;
  const UniqueFd fd = Memfd(kMany, /*populated=*/true, kAllSeals);
  ASSERT_EQ(lseek(fd.get(), 0, SEEK_HOLE), 0) << "reserved, never written";
  EXPECT_TRUE(internal::CheckReservedWithoutCounting(fd.get(), kMany).ok());
  EXPECT_EQ(lseek(fd.get(), 0, SEEK_HOLE), static_cast<off_t>(kMany));
}

TEST(PeerSegmentTest, RefusesWhatIsNoMemfd) {
  ExpectRefused(UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)), kBytes,
                "expected a sealed memfd");
  ExpectRefused(UniqueFd(), kBytes, "expected a sealed memfd");
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd other_end(ends[1]);
  ExpectRefused(UniqueFd(ends[0]), kBytes, "expected a sealed memfd");
  // A file in a tmpfs supports seals, but allows none.
  UniqueFd file(open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file.ok()) ExpectRefused(std::move(file), kBytes, "expected seals");
}

// Makes a regular file of `bytes` zeros in a temporary folder, open for
// writing.
UniqueFd MakeFile(uint64_t bytes) {
  std::string path = testing::TempDir() + "/segment-XXXXXX";
  UniqueFd fd(mkstemp(path.data()));
  unlink(path.c_str());
  EXPECT_EQ(posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes)), 0);
  return fd;
}

UniqueFd ReadOnly(const UniqueFd& file) {
  const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  return UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

TEST(PeerFileTest, IsReadAndCannotBeWritten) {
  const UniqueFd file = MakeFile(kBytes);
  const auto theirs = PeerSegment::MapFile(ReadOnly(file), kBytes);
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  ASSERT_EQ(pwrite(file.get(), "x", 1, 0), 1);
  EXPECT_EQ(theirs->data()[0], std::byte{'x'});
  EXPECT_EQ(mprotect(const_cast<std::byte*>(theirs->data()), kBytes,
                     PROT_READ | PROT_WRITE),
            -1);
}

TEST(PeerFileTest, RefusesWhatOthersMayChange) {
  const UniqueFd file = MakeFile(kBytes);
  const auto refusal = [](UniqueFd fd, uint64_t bytes) {
    const absl::Status status =
        PeerSegment::MapFile(std::move(fd), bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  using testing::HasSubstr;
  EXPECT_THAT(refusal(Dup(file.get()), kBytes), HasSubstr("reading alone"));
  EXPECT_THAT(refusal(ReadOnly(file), 2 * kBytes), HasSubstr("bytes"));
  ASSERT_EQ(fchmod(file.get(), 0620), 0);
  EXPECT_THAT(refusal(ReadOnly(file), kBytes), HasSubstr("mode 0620"));
  const UniqueFd holes(memfd_create("holes", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(holes.get(), 16 * kBytes), 0);
  ASSERT_EQ(fchmod(holes.get(), 0600), 0);
  EXPECT_THAT(refusal(ReadOnly(holes), 16 * kBytes),
              HasSubstr("without holes"));
}

}  // namespace
}  // namespace optstate::shm
