#include "storage/format/checksum.h"

#include <string>

#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

TEST(ChecksumTest, KnownValues) {
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32c("", 0), 0u);
  // The values are RFC 3720, B.4: 32 bytes of zeros, and of ones.
  EXPECT_EQ(Crc32c(std::string(32, '\0').data(), 32), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff').data(), 32), 0x62a8ab43u);
}

}  // namespace
}  // namespace optstate::storage
