#include "proto/types/shard.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate {
namespace {

using ::testing::HasSubstr;

TEST(ShardTest, NamesAreTakenApartWhateverTheGlobalNameIs) {
  for (const std::string name : {"w", "block.0.weight", "a@7", "@", "a@"}) {
    for (const uint32_t owner : {0u, 7u, 1023u}) {
      EXPECT_EQ(GlobalName(ShardName(name, owner)), name);
    }
  }
  EXPECT_EQ(ShardName("w", 3), "w@3");
  EXPECT_NE(ShardName("a@1", 2), ShardName("a", 12));
}

std::string ErrorOf(const std::string& name, std::vector<int64_t> shape,
                    const Shard& shard) {
  const absl::Status status = CheckShard(name, shape, shard);
  if (!status.ok()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
  return std::string(status.message());
}

TEST(ShardTest, AShardIsWithinItsTensor) {
  const Shard good = {.owner = 1, .global_shape = {8, 4}, .offset = {4, 0}};
  EXPECT_EQ(ErrorOf("w@1", {4, 4}, good), "");
  EXPECT_EQ(ErrorOf("w@1", {0, 4}, {1, {8, 4}, {8, 0}}), "");
  EXPECT_EQ(ErrorOf("s@0", {}, {0, {}, {}}), "");
  EXPECT_THAT(ErrorOf("w@1", {5, 4}, good),
              HasSubstr("dimension 0 of the shard has 5 elements from 4 on, "
                        "and its global tensor has 8"));
  EXPECT_THAT(ErrorOf("w@1", {4, 4}, {1, {8, 4}, {4, 1}}),
              HasSubstr("dimension 1"));
  EXPECT_THAT(ErrorOf("w@1", {4, 4}, {1, {8, 4}, {-1, 0}}),
              HasSubstr("dimension 0"));
  EXPECT_THAT(ErrorOf("w@1", {1}, {1, {INT64_MIN}, {0}}),
              HasSubstr("dimension 0"));
  EXPECT_THAT(ErrorOf("w@1", {1}, {1, {INT64_MAX}, {INT64_MAX}}),
              HasSubstr("dimension 0"));
  EXPECT_THAT(ErrorOf("w@1", {4}, good), HasSubstr("has 1 dimensions"));
  EXPECT_THAT(ErrorOf("w@1", {4, 4}, {1, {8, 4}, {4}}),
              HasSubstr("its offset 1"));
}

TEST(ShardTest, AShardIsNamedForItsOwner) {
  const Shard shard = {.owner = 1, .global_shape = {2}, .offset = {0}};
  for (const std::string name : {"w", "w@2", "w@01", "@1", "w@1 "}) {
    EXPECT_THAT(ErrorOf(name, {2}, shard), HasSubstr("must be the global"))
        << name;
  }
  EXPECT_THAT(ErrorOf("w@1024", {2}, {1024, {2}, {0}}),
              HasSubstr("the shard's owner is rank 1024"));
}

bool Overlap(const std::vector<int64_t>& offset,
             const std::vector<int64_t>& shape,
             const std::vector<int64_t>& other_offset,
             const std::vector<int64_t>& other_shape) {
  const Shard one = {.owner = 0, .global_shape = {}, .offset = offset};
  const Shard other = {.owner = 1, .global_shape = {}, .offset = other_offset};
  const bool found = ShardsOverlap(shape, one, other_shape, other);
  EXPECT_EQ(ShardsOverlap(other_shape, other, shape, one), found);
  return found;
}

TEST(ShardTest, OverlapIsACommonElement) {
  EXPECT_FALSE(Overlap({0, 0}, {2, 4}, {2, 0}, {2, 4}));
  EXPECT_FALSE(Overlap({0, 0}, {4, 2}, {0, 2}, {4, 2}));
  EXPECT_FALSE(Overlap({0, 0}, {2, 2}, {2, 2}, {2, 2}));
  EXPECT_TRUE(Overlap({0, 0}, {2, 4}, {1, 0}, {2, 4}));
  EXPECT_TRUE(Overlap({0, 0}, {4, 4}, {1, 1}, {1, 1}));
  EXPECT_TRUE(Overlap({}, {}, {}, {}));
  // Without elements, also in the middle of the other.
  EXPECT_FALSE(Overlap({0, 0}, {4, 4}, {2, 0}, {0, 4}));
  EXPECT_FALSE(Overlap({0, 0}, {4, 4}, {0, 2}, {4, 0}));
}

}  // namespace
}  // namespace optstate
