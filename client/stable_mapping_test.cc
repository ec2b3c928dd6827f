#include "client/stable_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "gtest/gtest.h"
#include "proto/shm/sealed_segment.h"

namespace optstate::client {
namespace {

constexpr uint64_t kBytes = 64 << 10;

shm::SealedSegment SegmentOf(int value) {
  auto segment = shm::SealedSegment::Create("test", kBytes);
  EXPECT_TRUE(segment.ok()) << segment.status();
  std::memset(segment->data(), value, kBytes);
  return *std::move(segment);
}

UniqueFd Duplicate(const shm::SealedSegment& segment) {
  return UniqueFd(fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0));
}

TEST(StableMappingTest, KeepsItsAddress) {
  const shm::SealedSegment first = SegmentOf(1);
  const shm::SealedSegment second = SegmentOf(2);
  StableMapping mapping;
  EXPECT_TRUE(mapping.bytes().empty());
  ASSERT_TRUE(mapping.Replace(Duplicate(first), kBytes).ok());
  const std::byte* const address = mapping.bytes().data();
  EXPECT_EQ(address[kBytes - 1], std::byte{1});
  // Shared, not copied.
  first.data()[0] = std::byte{9};
  EXPECT_EQ(address[0], std::byte{9});
  ASSERT_TRUE(mapping.Replace(Duplicate(second), kBytes).ok());
  EXPECT_EQ(mapping.bytes().data(), address);
  EXPECT_EQ(address[kBytes - 1], std::byte{2});
}

TEST(StableMappingTest, RefusedSegmentChangesNothing) {
  const shm::SealedSegment first = SegmentOf(1);
  StableMapping mapping;
  ASSERT_TRUE(mapping.Replace(Duplicate(first), kBytes).ok());
  UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(unsealed.get(), kBytes), 0);
  EXPECT_EQ(mapping.Replace(std::move(unsealed), kBytes).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(mapping.Replace(Duplicate(first), 2 * kBytes).ok());
  EXPECT_EQ(mapping.bytes()[kBytes - 1], std::byte{1});
}

}  // namespace
}  // namespace optstate::client
