#include "server/transport/grpc/chunk_header.h"

#include "optstate/v1/session.pb.h"

namespace optstate::transport {
namespace {

constexpr uint32_t kVarint = 0;
constexpr uint32_t kBytes = 2;

constexpr uint32_t Tag(int field, uint32_t wire_type) {
  return static_cast<uint32_t>(field) << 3 | wire_type;
}

constexpr uint32_t kRequestId =
    Tag(v1::SessionRequest::kRequestIdFieldNumber, kVarint);
constexpr uint32_t kGradientChunk =
    Tag(v1::SessionRequest::kGradientChunkFieldNumber, kBytes);
constexpr uint32_t kOffset =
    Tag(v1::GradientChunk::kOffsetBytesFieldNumber, kVarint);
constexpr uint32_t kData = Tag(v1::GradientChunk::kDataFieldNumber, kBytes);

// Reads a tag of one byte; 0: there is none. CodedInputStream::ReadTag() also
// takes longer forms that protobuf's parser refuses.
uint32_t ReadShortTag(google::protobuf::io::CodedInputStream* input) {
  static_assert(kRequestId < 128 && kGradientChunk < 128 && kOffset < 128 &&
                kData < 128);
  uint8_t tag = 0;
  return input->ReadRaw(&tag, sizeof(tag)) ? tag : 0;
}

// Reads the size of a part that ends the message; false: it does not. A size of
// more than 31 bits is refused, as by protobuf's parser, and not cut.
bool ReadLastSize(uint64_t message_bytes,
                  google::protobuf::io::CodedInputStream* input, int* size) {
  return input->ReadVarintSizeAsInt(size) &&
         static_cast<uint64_t>(input->CurrentPosition()) +
                 static_cast<uint64_t>(*size) ==
             message_bytes;
}

}  // namespace

std::optional<ChunkHeader> ReadChunkHeader(
    google::protobuf::io::CodedInputStream* input, uint64_t message_bytes) {
  ChunkHeader header;
  uint64_t request_id;
  uint32_t tag = ReadShortTag(input);
  if (tag == kRequestId) {
    if (!input->ReadVarint64(&request_id)) return std::nullopt;
    tag = ReadShortTag(input);
  }
  int chunk_bytes = 0;
  if (tag != kGradientChunk ||
      !ReadLastSize(message_bytes, input, &chunk_bytes)) {
    return std::nullopt;
  }
  tag = ReadShortTag(input);
  if (tag == kOffset) {
    if (!input->ReadVarint64(&header.offset_bytes)) return std::nullopt;
    tag = ReadShortTag(input);
  }
  int data_bytes = 0;
  if (tag != kData || !ReadLastSize(message_bytes, input, &data_bytes)) {
    return std::nullopt;
  }
  header.data_bytes = static_cast<uint64_t>(data_bytes);
  return header;
}

}  // namespace optstate::transport
