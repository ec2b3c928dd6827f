#include "client/views/fault_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPage = 4096;

// A file in memory and a shared mapping of it that may only be read.
class Mapped {
 public:
  explicit Mapped(uint64_t bytes)
      : fd_(memfd_create("guarded", MFD_CLOEXEC)), bytes_(bytes) {
    EXPECT_EQ(ftruncate(fd_.get(), static_cast<off_t>(bytes)), 0);
    void* const data =
        mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd_.get(), 0);
    EXPECT_NE(data, MAP_FAILED);
    data_ = static_cast<const std::byte*>(data);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() { munmap(const_cast<std::byte*>(data_), bytes_); }

  int fd() const { return fd_.get(); }
  absl::Span<const std::byte> bytes() const { return {data_, bytes_}; }
  void Cut(uint64_t bytes) const {
    ASSERT_EQ(ftruncate(fd_.get(), static_cast<off_t>(bytes)), 0);
  }
  int At(uint64_t offset) const {
    return std::to_integer<int>(
        *static_cast<const volatile std::byte*>(data_ + offset));
  }

 private:
  UniqueFd fd_;
  uint64_t bytes_;
  const std::byte* data_;
};

TEST(FaultGuardTest, WhatIsMissingIsZerosAndLost) {
  const Mapped file(16 * kPage);
  const FaultGuard guard(file.bytes(), PROT_READ);
  ASSERT_EQ(pwrite(file.fd(), "\x07", 1, 0), 1);
  file.Cut(3 * kPage);
  EXPECT_EQ(file.At(0), 7);
  EXPECT_FALSE(guard.lost());
  EXPECT_EQ(file.At(9 * kPage), 0);
  EXPECT_TRUE(guard.lost());
  EXPECT_EQ(file.At(3 * kPage), 0);
  EXPECT_EQ(file.At(16 * kPage - 1), 0);
  // The pages that remain in the file are still the file's.
  ASSERT_EQ(pwrite(file.fd(), "\x08", 1, 1), 1);
  EXPECT_EQ(file.At(1), 8);
}

TEST(FaultGuardTest, MoreRangesThanOneBlockOfSlots) {
  constexpr int kGuards = 600;
  const Mapped file(kGuards * kPage);
  std::vector<FaultGuard> guards;
  guards.reserve(kGuards);
  for (int i = 0; i < kGuards; ++i) {
    guards.emplace_back(file.bytes().subspan(i * kPage, kPage), PROT_READ);
  }
  file.Cut(0);
  for (int i = kGuards - 1; i >= 0; i -= 7) {
    EXPECT_EQ(file.At(i * kPage), 0);
    EXPECT_TRUE(guards[i].lost());
  }
  EXPECT_FALSE(guards[kGuards - 2].lost());
}

// A process may have some ten thousands of mappings, and a large file has more
// pages.
TEST(FaultGuardTest, ManyMissingPagesAreOneMapping) {
  constexpr uint64_t kPages = 300000;
  const Mapped file(kPages * kPage);
  const FaultGuard guard(file.bytes(), PROT_READ);
  file.Cut(0);
  int sum = 0;
  for (uint64_t page = 0; page < kPages; page += 2) {
    sum += file.At((page * 7919 % kPages) * kPage);
  }
  EXPECT_EQ(sum, 0);
}

TEST(FaultGuardTest, ManyThreadsMeetTheCut) {
  const Mapped file(512 * kPage);
  const FaultGuard guard(file.bytes(), PROT_READ);
  file.Cut(kPage);
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&file, i] {
      for (uint64_t page = 511 - i; page > 8; page -= 8) {
        EXPECT_EQ(file.At(page * kPage), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(guard.lost());
}

TEST(FaultGuardTest, TheErrorNamesTheFile) {
  const Mapped file(4 * kPage);
  const FaultGuard guard(file.bytes(), PROT_READ);
  EXPECT_TRUE(CheckNotCutShort(file.fd(), 4 * kPage, guard).ok());
  file.Cut(8);
  // No missing page has been touched yet.
  const absl::Status status = CheckNotCutShort(file.fd(), 4 * kPage, guard);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("memfd:guarded"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("to 8 bytes of 16384"));
  EXPECT_EQ(file.At(2 * kPage), 0);
  // The loss stays one when the file has its size again.
  file.Cut(4 * kPage);
  EXPECT_FALSE(CheckNotCutShort(file.fd(), 4 * kPage, guard).ok());
}

// By the signal, or by a sanitizer that handles it.
TEST(FaultGuardDeathTest, AFaultElsewhereEndsTheProcess) {
  const Mapped file(2 * kPage), other(2 * kPage);
  const FaultGuard guard(file.bytes(), PROT_READ);
  EXPECT_DEATH(
      {
        other.Cut(0);
        other.At(kPage);
      },
      "");
}

TEST(FaultGuardDeathTest, SoDoesOneWhereAGuardWas) {
  const Mapped file(2 * kPage);
  FaultGuard guard(file.bytes(), PROT_READ);
  guard = FaultGuard();
  EXPECT_DEATH(
      {
        file.Cut(0);
        file.At(kPage);
      },
      "");
}

}  // namespace
}  // namespace optstate::client
