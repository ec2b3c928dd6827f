#include "client/channel/shm/stable_mapping.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace optstate::client {
namespace {

constexpr uint64_t kBytes = 64 << 10;

// Makes a file whose bytes are all `value`, open for writing.
UniqueFd FileOf(int value) {
  std::string path = testing::TempDir() + "/mapping-XXXXXX";
  UniqueFd fd(mkstemp(path.data()));
  unlink(path.c_str());
  const std::vector<char> bytes(kBytes, static_cast<char>(value));
  EXPECT_EQ(write(fd.get(), bytes.data(), kBytes), ssize_t{kBytes});
  return fd;
}

UniqueFd ReadOnly(const UniqueFd& file) {
  const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  return UniqueFd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

TEST(StableMappingTest, KeepsItsAddress) {
  const UniqueFd first = FileOf(1);
  const UniqueFd second = FileOf(2);
  StableMapping mapping;
  EXPECT_TRUE(mapping.bytes().empty());
  ASSERT_TRUE(mapping.Replace(ReadOnly(first), kBytes).ok());
  const std::byte* const address = mapping.bytes().data();
  EXPECT_EQ(address[kBytes - 1], std::byte{1});
  // The mapping is shared, not a copy.
  ASSERT_EQ(pwrite(first.get(), "\x09", 1, 0), 1);
  EXPECT_EQ(address[0], std::byte{9});
  ASSERT_TRUE(mapping.Replace(ReadOnly(second), kBytes).ok());
  EXPECT_EQ(mapping.bytes().data(), address);
  EXPECT_EQ(address[kBytes - 1], std::byte{2});
}

// The rule for large mappings is in proto/shm/spread_mapping.h.
TEST(StableMappingTest, LargeOnesAreSpread) {
  constexpr uint64_t kLarge = (uint64_t{2} << 20) + 4096;
  const UniqueFd file = FileOf(1);
  ASSERT_EQ(posix_fallocate(file.get(), 0, kLarge), 0);
  StableMapping mappings[2];
  for (StableMapping& mapping : mappings) {
    ASSERT_TRUE(mapping.Replace(ReadOnly(file), kLarge).ok());
    const auto address = reinterpret_cast<uintptr_t>(mapping.bytes().data());
    EXPECT_EQ(address % (2 << 20), 0);
  }
}

TEST(StableMappingTest, RefusedFileChangesNothing) {
  const UniqueFd first = FileOf(1);
  StableMapping mapping;
  ASSERT_TRUE(mapping.Replace(ReadOnly(first), kBytes).ok());
  EXPECT_EQ(mapping.Replace(FileOf(2), kBytes).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(mapping.Replace(ReadOnly(first), 2 * kBytes).ok());
  EXPECT_EQ(mapping.bytes()[kBytes - 1], std::byte{1});
}

TEST(StableMappingTest, AFileThatIsCutShortIsAnErrorUntilThereIsAnother) {
  const UniqueFd first = FileOf(1);
  const UniqueFd second = FileOf(2);
  StableMapping mapping;
  EXPECT_TRUE(mapping.CheckWhole().ok());
  ASSERT_TRUE(mapping.Replace(ReadOnly(first), kBytes).ok());
  EXPECT_TRUE(mapping.CheckWhole().ok());
  ASSERT_EQ(ftruncate(first.get(), 8192), 0);
  EXPECT_EQ(mapping.bytes()[8191], std::byte{1});
  EXPECT_EQ(mapping.bytes()[8192], std::byte{0});  // no signal
  EXPECT_EQ(mapping.CheckWhole().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(mapping.Replace(ReadOnly(first), kBytes).code(),
            absl::StatusCode::kDataLoss);
  ASSERT_TRUE(mapping.Replace(ReadOnly(second), kBytes).ok());
  EXPECT_TRUE(mapping.CheckWhole().ok());
  EXPECT_EQ(mapping.bytes()[8192], std::byte{2});
}

}  // namespace
}  // namespace optstate::client
