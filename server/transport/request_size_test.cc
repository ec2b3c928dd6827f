#include "server/transport/request_size.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "gtest/gtest.h"
#include "optstate/v1/session.pb.h"

namespace optstate::transport {
namespace {

using ::google::protobuf::io::ArrayInputStream;
using ::testing::HasSubstr;

absl::StatusOr<uint64_t> Parsed(const std::string& bytes) {
  ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
  return ParsedBytes(&stream);
}

absl::StatusOr<bool> Admit(const std::string& bytes) {
  ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
  return AdmitRequest(&stream, bytes.size());
}
absl::Status Admitted(const std::string& bytes) {
  return Admit(bytes).status();
}

v1::SessionRequest WithParameters(int count) {
  v1::SessionRequest request;
  request.set_request_id(7);
  v1::Layout* const layout = request.mutable_register_()->mutable_layout();
  layout->add_groups();
  for (int i = 0; i < count; ++i) {
    v1::Parameter* const parameter = layout->add_parameters();
    parameter->set_name(absl::StrCat("layers.", i, ".attention.query.weight"));
    parameter->add_shape(1024);
    parameter->add_shape(4096);
    parameter->set_numel(1024 * 4096);
    parameter->set_dtype(v1::DTYPE_FLOAT32);
  }
  return request;
}

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value /= 128) {
    bytes += static_cast<char>(128 + value % 128);
  }
  return bytes + static_cast<char>(value);
}

// Encodes a field that holds bytes.
std::string Field(int number, const std::string& bytes) {
  return absl::StrCat(Varint(number << 3 | 2), Varint(bytes.size()), bytes);
}

// Encodes a register request whose layout is these bytes.
std::string Register(const std::string& layout) {
  return Field(2, Field(1, layout));
}

std::string Repeated(const std::string& bytes, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += bytes;
  return all;
}

TEST(RequestSizeTest, IsNoLessThanWhatParsingTakes) {
  for (const int count : {0, 1, 1000, 20000}) {
    const v1::SessionRequest request = WithParameters(count);
    const auto parsed = Parsed(request.SerializeAsString());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    v1::SessionRequest again;
    ASSERT_TRUE(again.ParseFromString(request.SerializeAsString()));
    EXPECT_GE(*parsed + sizeof(v1::SessionRequest), again.SpaceUsedLong());
    EXPECT_LE(*parsed, 3 * again.SpaceUsedLong());
  }
}

TEST(RequestSizeTest, OrdinaryLayoutsAreAdmitted) {
  EXPECT_FALSE(Admit(WithParameters(10000).SerializeAsString()).value_or(true));
  EXPECT_TRUE(
      Admit(WithParameters(400000).SerializeAsString()).value_or(false));
}

// Each parameter takes two bytes on the wire and a hundred in memory.
TEST(RequestSizeTest, ManyEmptyParametersAreRefusedBeforeTheyAreParsed) {
  const std::string bytes = Register(Repeated(Field(3, ""), 32 << 20));
  ASSERT_LE(bytes.size(), size_t{65} << 20);
  const absl::Status status = Admitted(bytes);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("too many parameters"));
}

TEST(RequestSizeTest, SoIsWhatElseGrows) {
  for (const std::string& layout : {
           Repeated(Field(2, ""), 32 << 20),                       // groups
           Field(3, Repeated(std::string("\x10\x01"), 32 << 20)),  // shape
           Field(3, Field(2, std::string(60 << 20, '\x01'))),  // packed shape
           Repeated(std::string("\x78\x01"), 30 << 20),        // unknown
       }) {
    EXPECT_FALSE(Admitted(Register(layout)).ok());
  }
  // A commit with many groups of hyperparameters.
  EXPECT_FALSE(Admitted(Field(6, Repeated(Field(2, ""), 32 << 20))).ok());
}

TEST(RequestSizeTest, WhatIsNoRequestIsRefused) {
  const std::string padding = Field(999, std::string(kSmallRequestBytes, 'x'));
  for (const std::string bad :
       {"\x0b", "\x12\xff", "\x12\xff\xff\xff\xff\xff", "\x08"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Admitted(padding + bad))) << bad;
  }
}

TEST(RequestSizeTest, SmallOnesAreNotLookedAt) {
  EXPECT_TRUE(Admitted(std::string(kSmallRequestBytes, '\xff')).ok());
}

}  // namespace
}  // namespace optstate::transport
