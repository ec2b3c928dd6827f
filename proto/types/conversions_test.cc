#include "proto/types/conversions.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate {
namespace {

using ::testing::HasSubstr;

v1::Layout SmallProto() {
  v1::Layout proto;
  proto.set_optimizer(v1::OPTIMIZER_KIND_ADAM);
  proto.add_groups()->set_options(1);
  for (const char* name : {"a", "b"}) {
    v1::Parameter& parameter = *proto.add_parameters();
    parameter.set_name(name);
    parameter.add_shape(3);
    parameter.set_numel(3);
    parameter.set_dtype(v1::DTYPE_BFLOAT16);
    parameter.set_gradient_dtype(v1::DTYPE_FLOAT16);
  }
  return proto;
}

void ExpectInvalid(const v1::Layout& proto, const std::string& reason) {
  const absl::Status status = LayoutFromProto(proto).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
}

TEST(ConversionsTest, LayoutTakesEveryField) {
  const auto layout = LayoutFromProto(SmallProto());
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->optimizer(), OptimizerKind::kAdam);
  EXPECT_TRUE(layout->groups()[0].options == 1);
  const ParameterSpec& b = layout->parameters()[1];
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.shape, std::vector<int64_t>{3});
  EXPECT_EQ(b.numel, 3);
  EXPECT_EQ(b.dtype, DType::kBFloat16);
  EXPECT_EQ(b.gradient_dtype, DType::kFloat16);
  EXPECT_EQ(b.group, 0u);
}

TEST(ConversionsTest, LayoutsSurviveTheWire) {
  RandomLayouts random;
  for (int round = 0; round < 50; ++round) {
    const auto layout = Layout::Make(random.Next(30));
    ASSERT_TRUE(layout.ok()) << layout.status();
    v1::Layout proto;
    ASSERT_TRUE(proto.ParseFromString(ToProto(*layout).SerializeAsString()));
    const auto again = LayoutFromProto(proto);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->hash(), layout->hash());
  }
}

TEST(ConversionsTest, ShardsSurviveTheWire) {
  v1::Layout proto = SmallProto();
  for (int owner = 0; owner < 2; ++owner) {
    v1::Parameter& parameter = *proto.mutable_parameters(owner);
    parameter.set_name(owner == 0 ? "w@0" : "w@1");
    v1::Shard& shard = *parameter.mutable_shard();
    shard.set_owner(owner);
    shard.add_global_shape(6);
    shard.add_offset(3 * owner);
  }
  const auto layout = LayoutFromProto(proto);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->parameters()[1].shard,
            (Shard{.owner = 1, .global_shape = {6}, .offset = {3}}));
  v1::Layout again;
  ASSERT_TRUE(again.ParseFromString(ToProto(*layout).SerializeAsString()));
  EXPECT_EQ(again.parameters(1).shard().SerializeAsString(),
            proto.parameters(1).shard().SerializeAsString());
  const auto back = LayoutFromProto(again);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->hash(), layout->hash());
  // A description from before there were shards has none.
  EXPECT_FALSE(LayoutFromProto(SmallProto())->has_shards());
  EXPECT_FALSE(
      ToProto(*LayoutFromProto(SmallProto())).parameters(0).has_shard());
}

TEST(ConversionsTest, ErrorsNameTheField) {
  v1::Layout proto = SmallProto();
  proto.clear_optimizer();
  ExpectInvalid(proto, "optimizer is not set");

  proto = SmallProto();
  proto.set_optimizer(static_cast<v1::OptimizerKind>(77));
  ExpectInvalid(proto, "optimizer 77 is not known here");

  proto = SmallProto();
  proto.mutable_parameters(1)->clear_dtype();
  ExpectInvalid(proto, "parameters[1]: dtype is not set");

  proto = SmallProto();
  proto.mutable_parameters(1)->set_gradient_dtype(static_cast<v1::DType>(-1));
  ExpectInvalid(proto, "parameters[1]: gradient: dtype -1 is not known here");

  proto = SmallProto();
  proto.mutable_parameters(1)->set_name("a");
  ExpectInvalid(proto, "parameter 1 \"a\"");

  ExpectInvalid(v1::Layout(), "optimizer is not set");
}

TEST(ConversionsTest, EnumsAreChecked) {
  EXPECT_EQ(*DTypeFromProto(v1::DTYPE_FLOAT32), DType::kFloat32);
  EXPECT_FALSE(DTypeFromProto(v1::DTYPE_UNSPECIFIED).ok());
  // 257 would be float32 if it were cast first and checked then.
  EXPECT_FALSE(DTypeFromProto(static_cast<v1::DType>(257)).ok());
  EXPECT_EQ(*PartitionModeFromProto(v1::PARTITION_MODE_CONTIGUOUS),
            PartitionMode::kContiguous);
  EXPECT_FALSE(PartitionModeFromProto(v1::PARTITION_MODE_UNSPECIFIED).ok());
  EXPECT_FALSE(
      PartitionModeFromProto(static_cast<v1::PartitionMode>(258)).ok());
}

TEST(ConversionsTest, StatusesSurviveTheWire) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    EXPECT_EQ(FromProto(ToProto(status)), status);
  }
}

TEST(ConversionsTest, OutcomesSurviveTheWire) {
  v1::StepOutcome proto;
  proto.set_step(1);
  proto.set_applied(true);
  proto.set_found_inf(true);
  proto.set_gradient_norm(2);
  proto.set_clip_coefficient(3);
  proto.set_update_ns(4);
  proto.set_loss_scale(5);
  proto.set_good_steps(6);
  proto.set_hysteresis_left(7);
  proto.set_durable_step(8);
  EXPECT_EQ(ToProto(FromProto(proto)).SerializeAsString(),
            proto.SerializeAsString());
}

TEST(ConversionsTest, UnknownCodesBecomeUnknown) {
  for (int code : {-1, 17, 1 << 30}) {
    v1::OpStatus proto;
    proto.set_code(code);
    proto.set_message("why");
    EXPECT_EQ(FromProto(proto), absl::UnknownError("why"));
  }
}

TEST(ConversionsTest, AnyMessageCanBeParsed) {
  const v1::OpStatus proto = ToProto(absl::NotFoundError("job \xff\xfe"));
  v1::OpStatus parsed;
  ASSERT_TRUE(parsed.ParseFromString(proto.SerializeAsString()));
  EXPECT_EQ(parsed.message(), "job \\377\\376");
}

}  // namespace
}  // namespace optstate
