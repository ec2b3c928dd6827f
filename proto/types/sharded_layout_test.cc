// Layouts whose parameters are shards.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/layout.h"

namespace optstate {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

ParameterSpec Part(const std::string& name, uint32_t owner,
                   std::vector<int64_t> shape, std::vector<int64_t> offset,
                   std::vector<int64_t> global_shape) {
  int64_t numel = 1;
  for (int64_t dimension : shape) numel *= dimension;
  return {.name = ShardName(name, owner),
          .shape = std::move(shape),
          .numel = numel,
          .shard = Shard{.owner = owner,
                         .global_shape = std::move(global_shape),
                         .offset = std::move(offset)}};
}

// Returns two parameters on two ranks: an uneven and an empty last shard.
LayoutSpec SmallSpec() {
  return {
      .groups = {{}},
      .parameters = {Part("w", 0, {4, 4}, {0, 0}, {7, 4}),
                     Part("w", 1, {3, 4}, {4, 0}, {7, 4}),
                     Part("b", 0, {1}, {0}, {1}), Part("b", 1, {0}, {1}, {1})}};
}

Layout MakeOrDie(LayoutSpec spec) {
  absl::StatusOr<Layout> layout = Layout::Make(std::move(spec));
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

// Returns the error of a layout to which `change` was made.
std::string ErrorOf(
    const std::function<void(LayoutSpec&)>& change,
    absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  LayoutSpec spec = SmallSpec();
  change(spec);
  const absl::Status status = Layout::Make(std::move(spec)).status();
  EXPECT_EQ(status.code(), code) << status;
  return std::string(status.message());
}

TEST(ShardedLayoutTest, ShardsAreParametersOfTheirOwnShapes) {
  const Layout layout = MakeOrDie(SmallSpec());
  EXPECT_TRUE(layout.has_shards());
  EXPECT_EQ(layout.element_count(), 7u * 4 + 1);
  EXPECT_EQ(layout.flat_offset(1), 16u);
  EXPECT_EQ(layout.parameters()[1].shard->offset, (std::vector<int64_t>{4, 0}));
  LayoutSpec whole = SmallSpec();
  for (ParameterSpec& parameter : whole.parameters) parameter.shard.reset();
  EXPECT_FALSE(MakeOrDie(whole).has_shards());
}

// Computed apart from this code, by Python's hashlib over the documented bytes.
TEST(ShardedLayoutTest, HashIsTheDocumentedOne) {
  EXPECT_EQ(absl::BytesToHexString(MakeOrDie(SmallSpec()).hash()),
            "f8280e92f0e82b8802f7f8f3184759ab2b73979a1e4d586b28df3686c5d9d14f");
}

TEST(ShardedLayoutTest, HashChangesWithEveryFact) {
  const std::string hash = MakeOrDie(SmallSpec()).hash();
  const auto changed = [&hash](const auto& change) {
    LayoutSpec spec = SmallSpec();
    change(spec);
    return MakeOrDie(spec).hash() != hash;
  };
  EXPECT_TRUE(changed([](LayoutSpec& s) {
    s.parameters[2] = Part("b", 1, {1}, {0}, {1});
    s.parameters[3] = Part("b", 0, {0}, {1}, {1});
  }));
  EXPECT_TRUE(
      changed([](LayoutSpec& s) { s.parameters[3].shard->offset = {0}; }));
  EXPECT_TRUE(changed([](LayoutSpec& s) {
    s.parameters[0].shard->global_shape = {8, 4};
    s.parameters[1].shard->global_shape = {8, 4};
  }));
  EXPECT_TRUE(changed([](LayoutSpec& s) {
    for (ParameterSpec& parameter : s.parameters) parameter.shard.reset();
  }));
}

TEST(ShardedLayoutTest, RefusesShardsThatDoNotFit) {
  EXPECT_THAT(
      ErrorOf([](LayoutSpec& s) {
        s.parameters[1].shard->offset = {5, 0};
      }),
      HasSubstr("parameter 1 \"w@1\": dimension 0 of the shard has 3 elements "
                "from 5 on"));
  EXPECT_THAT(
      ErrorOf([](LayoutSpec& s) {
        s.parameters[1].shard->offset = {3, 0};
      }),
      HasSubstr("parameter 1 \"w\", the shard of rank 1: it has elements that "
                "the shard of rank 0 has as well"));
  EXPECT_THAT(ErrorOf([](LayoutSpec& s) {
                s.parameters[1].shard->global_shape = {8, 4};
              }),
              HasSubstr("another global shape than the shard of rank 0"));
  EXPECT_THAT(
      ErrorOf([](LayoutSpec& s) { s.parameters[1].dtype = DType::kBFloat16; }),
      HasSubstr("\"w\", the shard of rank 1: it has another dtype"));
  EXPECT_THAT(ErrorOf([](LayoutSpec& s) {
                s.parameters[1].gradient_dtype = DType::kBFloat16;
              }),
              HasSubstr("another gradient dtype"));
  EXPECT_THAT(ErrorOf([](LayoutSpec& s) {
                s.groups.push_back({});
                s.parameters[3].group = 1;
              }),
              HasSubstr("\"b\", the shard of rank 1: it has another group"));
  EXPECT_THAT(ErrorOf([](LayoutSpec& s) { s.parameters[3].shard.reset(); }),
              AllOf(HasSubstr("parameter 3 \"b@1\": it is no shard"),
                    HasSubstr("either all are or none is")));
  EXPECT_THAT(
      ErrorOf([](LayoutSpec& s) { s.parameters[0].shard.reset(); }),
      HasSubstr("parameter 1 \"w\", the shard of rank 1: it is a shard"));
  EXPECT_THAT(ErrorOf([](LayoutSpec& s) { s.parameters[3].name = "b@0"; }),
              HasSubstr("parameter 2 has the same name"));
}

TEST(ShardedLayoutTest, OptimizersOfWholeParametersTakeWholeParameters) {
  for (const OptimizerKind kind :
       {OptimizerKind::kLamb, OptimizerKind::kAdafactor}) {
    EXPECT_THAT(ErrorOf([kind](LayoutSpec& s) { s.optimizer = kind; },
                        absl::StatusCode::kUnimplemented),
                AllOf(HasSubstr("needs the whole parameter"),
                      HasSubstr("do not shard")));
    LayoutSpec whole = SmallSpec();
    whole.optimizer = kind;
    whole.parameters = {Part("w", 0, {4, 4}, {0, 0}, {4, 4}),
                        Part("v", 1, {4, 4}, {0, 0}, {4, 4})};
    EXPECT_TRUE(Layout::Make(whole).ok());
  }
}

// Returns the error of CheckSame when `change` is made to the layout of a rank.
std::string Difference(const std::function<void(LayoutSpec&)>& change,
                       bool allow_extension = false) {
  LayoutSpec spec = SmallSpec();
  change(spec);
  const absl::Status status =
      MakeOrDie(SmallSpec()).CheckSame(MakeOrDie(spec), allow_extension);
  if (status.ok()) return "OK";
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  return std::string(status.message());
}

TEST(ShardedLayoutTest, CheckSameNamesTheFirstDifference) {
  EXPECT_EQ(Difference([](LayoutSpec&) {}), "OK");
  EXPECT_THAT(
      Difference([](LayoutSpec& s) {
        s.parameters = {
            Part("w", 0, {3, 4}, {0, 0}, {7, 4}),
            Part("w", 1, {3, 4}, {3, 0}, {7, 4}),
            Part("w", 2, {1, 4}, {6, 0}, {7, 4}),
        };
      }),
      AllOf(HasSubstr("the layout is shards of 2 ranks in the job, shards of "
                      "3 ranks here"),
            HasSubstr("torch.distributed.checkpoint")));
  EXPECT_THAT(Difference([](LayoutSpec& s) {
                s.parameters[0] = Part("w", 0, {7, 2}, {0, 0}, {7, 4});
                s.parameters[1] = Part("w", 1, {7, 2}, {0, 2}, {7, 4});
              }),
              AllOf(HasSubstr("parameter 0 \"w\", the shard of rank 0 is "
                              "float32[4,4] at [0,0] of [7,4] in the job, "
                              "float32[7,2] at [0,0] of [7,4] here"),
                    HasSubstr("torch.distributed.checkpoint")));
  EXPECT_THAT(
      Difference([](LayoutSpec& s) { s.parameters[3].shard->offset = {0}; }),
      HasSubstr("float32[0] at [1] of [1] in the job, float32[0] at "
                "[0] of [1] here"));
  EXPECT_THAT(Difference([](LayoutSpec& s) {
                for (auto& parameter : s.parameters) parameter.shard.reset();
              }),
              AllOf(HasSubstr("shards of 2 ranks in the job, whole parameters "
                              "here"),
                    Not(HasSubstr("checkpoint"))));
}

TEST(ShardedLayoutTest, AnExtensionAddsWholeGroupsAtTheEnd) {
  const auto add_group = [](LayoutSpec& s) {
    s.groups.push_back({});
    for (const uint32_t owner : {0u, 1u}) {
      s.parameters.push_back(Part("c", owner, {1}, {owner}, {2}));
      s.parameters.back().group = 1;
    }
  };
  EXPECT_EQ(Difference(add_group, true), "OK");
  EXPECT_EQ(Difference(add_group, false),
            "the number of parameters is 4 in the job, 6 here");
}

}  // namespace
}  // namespace optstate
