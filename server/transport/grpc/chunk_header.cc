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

}  // namespace

std::optional<ChunkHeader> ReadChunkHeader(
    google::protobuf::io::CodedInputStream* input, uint64_t message_bytes) {
  ChunkHeader header;
  uint64_t request_id;
  uint32_t tag = input->ReadTag();
  if (tag == kRequestId) {
    if (!input->ReadVarint64(&request_id)) return std::nullopt;
    tag = input->ReadTag();
  }
  uint32_t chunk_bytes;
  if (tag != kGradientChunk || !input->ReadVarint32(&chunk_bytes) ||
      static_cast<uint64_t>(input->CurrentPosition()) + chunk_bytes !=
          message_bytes) {
    return std::nullopt;
  }
  tag = input->ReadTag();
  if (tag == kOffset) {
    if (!input->ReadVarint64(&header.offset_bytes)) return std::nullopt;
    tag = input->ReadTag();
  }
  uint32_t data_bytes;
  if (tag != kData || !input->ReadVarint32(&data_bytes) ||
      static_cast<uint64_t>(input->CurrentPosition()) + data_bytes !=
          message_bytes) {
    return std::nullopt;
  }
  header.data_bytes = data_bytes;
  return header;
}

}  // namespace optstate::transport
