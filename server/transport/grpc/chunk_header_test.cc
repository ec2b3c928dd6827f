#include "server/transport/grpc/chunk_header.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <string>

#include "gtest/gtest.h"
#include "optstate/v1/session.pb.h"

namespace optstate::transport {
namespace {

using google::protobuf::io::ArrayInputStream;
using google::protobuf::io::CodedInputStream;

std::optional<ChunkHeader> Read(const std::string& message) {
  ArrayInputStream stream(message.data(), static_cast<int>(message.size()));
  CodedInputStream input(&stream);
  return ReadChunkHeader(&input, message.size());
}

v1::SessionRequest Chunk(uint64_t request_id, uint64_t offset,
                         const std::string& data) {
  v1::SessionRequest request;
  request.set_request_id(request_id);
  request.mutable_gradient_chunk()->set_offset_bytes(offset);
  request.mutable_gradient_chunk()->set_data(data);
  return request;
}

TEST(ChunkHeaderTest, FindsTheData) {
  for (const uint64_t request_id : {uint64_t{0}, uint64_t{5}, UINT64_MAX}) {
    for (const uint64_t offset : {uint64_t{0}, uint64_t{4096}, UINT64_MAX}) {
      for (const size_t bytes : {1u, 127u, 128u, 1u << 20}) {
        const std::string message =
            Chunk(request_id, offset, std::string(bytes, 'g'))
                .SerializeAsString();
        const auto header = Read(message);
        ASSERT_TRUE(header.has_value());
        EXPECT_EQ(header->offset_bytes, offset);
        EXPECT_EQ(header->data_bytes, bytes);
      }
    }
  }
}

TEST(ChunkHeaderTest, LeavesEverythingElseToTheParser) {
  EXPECT_FALSE(Read("").has_value());
  EXPECT_FALSE(Read(std::string(40, '\xff')).has_value());
  v1::SessionRequest push;
  push.set_request_id(1);
  push.mutable_push()->set_step(3);
  EXPECT_FALSE(Read(push.SerializeAsString()).has_value());
  // There is no data; or the data is not the end of the message.
  EXPECT_FALSE(Read(Chunk(1, 2, "").SerializeAsString()).has_value());
  EXPECT_FALSE(
      Read(Chunk(1, 2, "data").SerializeAsString() + "\x08\x01").has_value());
}

TEST(ChunkHeaderTest, LeavesToTheParserWhatThatRefuses) {
  const std::string chunk = "\x22\x07\x08\x40\x12\x03ggg";
  ASSERT_TRUE(Read(chunk).has_value());
  const std::string of_ten_bytes = "\x80\x80\x80\x80\x80\x80\x80\x80";
  const std::string messages[] = {
      // A tag of ten bytes, that of the chunk and that of its offset.
      "\xa2" + of_ten_bytes + std::string(1, '\0') + chunk.substr(1),
      "\x22\x10\x88" + of_ten_bytes + std::string(1, '\0') + chunk.substr(3),
      // Sizes of 33 bits, whose lower 32 would do.
      "\x22\x87\x80\x80\x80\x10" + chunk.substr(2),
      "\x22\x0b\x08\x40\x12\x83\x80\x80\x80\x10ggg",
  };
  for (const std::string& message : messages) {
    v1::SessionRequest request;
    ASSERT_FALSE(request.ParseFromString(message));
    EXPECT_FALSE(Read(message).has_value());
  }
}

TEST(ChunkHeaderTest, NoPrefixOfAChunkPasses) {
  const std::string message =
      Chunk(300, 1 << 20, std::string(300, 'g')).SerializeAsString();
  for (size_t bytes = 0; bytes < message.size(); ++bytes) {
    EXPECT_FALSE(Read(message.substr(0, bytes)).has_value()) << bytes;
  }
}

}  // namespace
}  // namespace optstate::transport
