#include "server/transport/transfer_range.h"

#include <gtest/gtest.h>

#include <limits>

#include "optstate/v1/types.pb.h"

namespace optstate::transport {
namespace {

TEST(TransferRangeTest, Arrays) {
  EXPECT_TRUE(CheckArray(v1::STATE_ARRAY_MASTER).ok());
  EXPECT_TRUE(CheckArray(v1::STATE_ARRAY_PREPARED_SUM).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(CheckArray(0)));
  EXPECT_TRUE(
      absl::IsInvalidArgument(CheckArray(v1::STATE_ARRAY_PREPARED_SUM + 1)));
  EXPECT_TRUE(IsPerParameter(v1::STATE_ARRAY_STEP_COUNT));
  EXPECT_FALSE(IsPerParameter(v1::STATE_ARRAY_MASTER));
}

TEST(TransferRangeTest, BytesThatOverflowAreTheMost) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(BytesOf(3, 4), 12u);
  EXPECT_EQ(BytesOf(kMost / 4, 4), kMost / 4 * 4);
  EXPECT_EQ(BytesOf(kMost / 4 + 1, 4), kMost);
}

}  // namespace
}  // namespace optstate::transport
