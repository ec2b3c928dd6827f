#include "storage/block_device/superblock.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"

namespace optstate::storage {
namespace {

Superblock Example() {
  return {.device_id = "00112233445566778899aabbccddeeff",
          .directory_id = "ffeeddccbbaa99887766554433221100",
          .device_bytes = uint64_t{3} << 30,
          .formatted_at_ns = 5};
}

TEST(SuperblockTest, IsReadAsItWasWritten) {
  const std::string bytes = EncodeSuperblock(Example());
  ASSERT_EQ(bytes.size(), kSuperblockBytes);
  const auto read = DecodeSuperblock(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, Example());
}

// As FORMAT.md has them.
TEST(SuperblockTest, BytesStayWhereTheyAre) {
  const std::string bytes = EncodeSuperblock(Example());
  EXPECT_EQ(bytes.substr(0, 8), "SODEVIC1");
  EXPECT_EQ(bytes.substr(8, 8), std::string("\1\0\0\0\4\3\2\1", 8));
  EXPECT_EQ(bytes.substr(16, 4), std::string("\0\x11\x22\x33", 4));
  EXPECT_EQ(bytes.substr(32, 4), "\xff\xee\xdd\xcc");
  EXPECT_EQ(bytes.substr(48, 8), std::string("\0\0\0\xc0\0\0\0\0", 8));
  EXPECT_EQ(bytes.substr(56, 8), std::string("\0\0\x10\0\0\0\0\0", 8));
  EXPECT_EQ(bytes.substr(64, 8), std::string("\5\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(bytes.find_first_not_of('\0', 72), size_t{4092});
}

TEST(SuperblockTest, NoneDamagedOrOfAnotherVersion) {
  std::string bytes(kSuperblockBytes, '\0');
  EXPECT_TRUE(absl::IsNotFound(DecodeSuperblock(bytes).status()));
  EXPECT_TRUE(absl::IsNotFound(DecodeSuperblock("").status()));
  const std::string good = EncodeSuperblock(Example());
  for (const size_t version_or_byte_order : {8, 12}) {
    bytes = good;
    bytes[version_or_byte_order] = 2;
    EXPECT_TRUE(absl::IsFailedPrecondition(DecodeSuperblock(bytes).status()));
  }
  for (size_t i = 16; i < kSuperblockBytes; ++i) {
    bytes = good;
    bytes[i] = static_cast<char>(bytes[i] ^ 4);
    EXPECT_TRUE(absl::IsDataLoss(DecodeSuperblock(bytes).status())) << i;
  }
}

TEST(SuperblockTest, IdsDiffer) {
  EXPECT_EQ(NewDeviceId().size(), 32u);
  EXPECT_NE(NewDeviceId(), NewDeviceId());
}

}  // namespace
}  // namespace optstate::storage
