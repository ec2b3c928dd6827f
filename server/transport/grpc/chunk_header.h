#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_CHUNK_HEADER_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_CHUNK_HEADER_H_

#include <google/protobuf/io/coded_stream.h>

#include <cstdint>
#include <optional>

namespace optstate::transport {

// A SessionRequest with a GradientChunk, up to where its data begins.
struct ChunkHeader {
  uint64_t offset_bytes = 0;
  uint64_t data_bytes = 0;
};

// Reads the header of a serialised SessionRequest of `message_bytes` bytes that
// holds a GradientChunk whose data comes last, as every protobuf library writes
// it; afterwards `input` stands at the data, which ends the message. Returns
// nullopt for any other message, valid or not; such a message is to be parsed
// from its beginning.
//
// Gradients are most of what a session carries, and protobuf's own parser would
// copy them once more on their way to the staging area.
std::optional<ChunkHeader> ReadChunkHeader(
    google::protobuf::io::CodedInputStream* input, uint64_t message_bytes);

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_CHUNK_HEADER_H_
