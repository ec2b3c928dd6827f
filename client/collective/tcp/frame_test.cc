#include "client/collective/tcp/frame.h"

#include "client/collective/tcp/address_record.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

Frame Example() {
  return {.operation = Operation::kReduce,
          .type = ElementType::kBFloat16,
          .from = 3,
          .root = 2,
          .sequence = 0x0102030405060708,
          .exchange = 5,
          .count = uint64_t{1} << 40,
          .payload_bytes = 77};
}

TEST(Frame, ComesBack) {
  const Frame::Bytes bytes = Encode(Example());
  EXPECT_EQ(bytes[0], std::byte{'O'});
  EXPECT_EQ(bytes[3], std::byte{'1'});
  EXPECT_EQ(bytes[16], std::byte{8});  // little endian
  const absl::StatusOr<Frame> frame = Decode(bytes);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(frame->operation, Operation::kReduce);
  EXPECT_EQ(frame->type, ElementType::kBFloat16);
  EXPECT_EQ(frame->from, 3u);
  EXPECT_EQ(frame->root, 2u);
  EXPECT_EQ(frame->sequence, 0x0102030405060708u);
  EXPECT_EQ(frame->exchange, 5u);
  EXPECT_EQ(frame->count, uint64_t{1} << 40);
  EXPECT_EQ(frame->payload_bytes, 77u);
}

// Whatever single byte of the fixed part is another one, it is noticed.
TEST(Frame, OtherBytesAreRefused) {
  for (const size_t at : {0, 1, 2, 3, 6, 7}) {
    Frame::Bytes bytes = Encode(Example());
    bytes[at] ^= std::byte{0x40};
    EXPECT_TRUE(absl::IsDataLoss(Decode(bytes).status())) << at;
  }
  for (const uint8_t operation : {0, 7, 254}) {
    Frame::Bytes bytes = Encode(Example());
    bytes[4] = std::byte{operation};
    EXPECT_TRUE(absl::IsDataLoss(Decode(bytes).status())) << int{operation};
  }
  for (const uint8_t type : {0, 5, 255}) {
    Frame::Bytes bytes = Encode(Example());
    bytes[5] = std::byte{type};
    EXPECT_TRUE(absl::IsDataLoss(Decode(bytes).status())) << int{type};
  }
  const Frame::Bytes bytes = Encode(Example());
  EXPECT_FALSE(Decode(absl::MakeConstSpan(bytes).subspan(1)).ok());
}

TEST(Frame, TheFirstDifferenceIsNamed) {
  const Frame expected = Example();
  EXPECT_TRUE(CheckExpected(expected, expected).ok());
  const auto refused = [&](auto change) {
    Frame received = expected;
    change(&received);
    const absl::Status status = CheckExpected(expected, received);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused([](Frame* f) { f->sequence = 9; }),
              HasSubstr("number of the operation: rank 3"));
  EXPECT_THAT(refused([](Frame* f) { f->operation = Operation::kBarrier; }),
              HasSubstr("the operation: rank 3 is in barrier"));
  EXPECT_THAT(refused([](Frame* f) { f->type = ElementType::kFloat32; }),
              HasSubstr("element type"));
  EXPECT_THAT(refused([](Frame* f) { f->root = 1; }), HasSubstr("the root"));
  EXPECT_THAT(refused([](Frame* f) { f->count = 1; }),
              HasSubstr("number of elements"));
  EXPECT_THAT(refused([](Frame* f) { f->payload_bytes = 1; }),
              HasSubstr("slice_bytes"));
  EXPECT_THAT(refused([](Frame* f) { f->exchange = 1; }),
              HasSubstr("slice_bytes"));
  Frame other = expected;
  other.from = 1;
  EXPECT_TRUE(absl::IsDataLoss(CheckExpected(expected, other)));
}

TEST(AddressRecord, ComesBack) {
  AddressRecord record;
  record.world_size = 12;
  record.port = 65535;
  record.knock.fill(0xAB);
  record.answer.fill(0x0C);
  record.host = "fe80::1";
  const absl::StatusOr<AddressRecord> parsed =
      ParseAddressRecord(record.ToString());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->ToString(), record.ToString());
  EXPECT_EQ(parsed->host, "fe80::1");
  EXPECT_TRUE(AreEqual(parsed->knock, record.knock));
  EXPECT_FALSE(AreEqual(parsed->knock, record.answer));
}

TEST(AddressRecord, OtherTextsAreRefused) {
  const std::string secret(32, 'a');
  const std::string good =
      "optstate-tcp-1 2 80 " + secret + " " + secret + " host";
  ASSERT_TRUE(ParseAddressRecord(good).ok());
  for (const std::string& text :
       {std::string(), good + " more", good.substr(0, good.size() - 4),
        "optstate-tcp-2" + good.substr(14),
        "optstate-tcp-1 -2 80 " + secret + " " + secret + " host",
        "optstate-tcp-1 2 0 " + secret + " " + secret + " host",
        "optstate-tcp-1 2 65536 " + secret + " " + secret + " host",
        "optstate-tcp-1 2 80 " + secret.substr(1) + "g " + secret + " host",
        "optstate-tcp-1 2 80 " + secret.substr(2) + " " + secret + " host",
        "optstate-tcp-1 2 80 " + secret + " " + secret + " " +
            std::string(256, 'h')}) {
    EXPECT_TRUE(absl::IsDataLoss(ParseAddressRecord(text).status())) << text;
  }
}

TEST(Greeting, ComesBack) {
  Greeting greeting;
  greeting.secret.fill(7);
  greeting.rank = 5;
  greeting.world_size = 0x01020304;
  Greeting::Bytes bytes = Encode(greeting);
  const absl::StatusOr<Greeting> decoded = DecodeGreeting(bytes);
  ASSERT_TRUE(decoded.ok());
  EXPECT_TRUE(AreEqual(decoded->secret, greeting.secret));
  EXPECT_EQ(decoded->rank, 5u);
  EXPECT_EQ(decoded->world_size, 0x01020304u);
  bytes[0] ^= 1;
  EXPECT_TRUE(absl::IsDataLoss(DecodeGreeting(bytes).status()));
}

}  // namespace
}  // namespace optstate::client
