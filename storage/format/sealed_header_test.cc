#include "storage/format/sealed_header.h"

#include <cstddef>
#include <cstdint>

#include "gtest/gtest.h"
#include "storage/format/checksum.h"

namespace optstate::storage {
namespace {

struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t header_crc32c;
};

TEST(SealedHeaderTest, EachBitIsCovered) {
  Header header = {0x1122334455667788, 3, 0};
  EXPECT_FALSE(IsSealed(header));
  Seal(&header);
  EXPECT_TRUE(IsSealed(header));
  EXPECT_EQ(header.header_crc32c, Crc32c(&header, 12));
  for (size_t bit = 0; bit < 8 * sizeof(header); ++bit) {
    Header damaged = header;
    auto* const bytes = reinterpret_cast<uint8_t*>(&damaged);
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    EXPECT_FALSE(IsSealed(damaged)) << bit;
  }
}

}  // namespace
}  // namespace optstate::storage
