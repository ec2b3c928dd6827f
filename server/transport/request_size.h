#ifndef OPTSTATE_SERVER_TRANSPORT_REQUEST_SIZE_H_
#define OPTSTATE_SERVER_TRANSPORT_REQUEST_SIZE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/io/zero_copy_stream.h"

namespace optstate::transport {

// Requests up to this size are parsed without a check: whatever they hold, it
// takes a few MiB in memory.
inline constexpr size_t kSmallRequestBytes = 64 << 10;
// Requests that take more than this, parsed, are in memory one at a time
// (SessionTable::large_request), if the machine has that much left.
inline constexpr uint64_t kLargeParsedBytes = uint64_t{64} << 20;
// Limit of a request's size in memory, parsed. A layout of a million parameters
// takes half of it.
inline constexpr uint64_t kParsedBytesMax = uint64_t{512} << 20;

// Estimates a serialised v1::SessionRequest's size in memory from its wire
// form, rather too high; allocates nothing. Counting ends beyond
// kParsedBytesMax. INVALID_ARGUMENT: the bytes are no SessionRequest.
absl::StatusOr<uint64_t> ParsedBytes(
    google::protobuf::io::ZeroCopyInputStream* request);

// Checks whether a request of `bytes` bytes may be parsed; true: it is a large
// one. INVALID_ARGUMENT: it would take more than kParsedBytesMax;
// RESOURCE_EXHAUSTED: more than the machine has left.
absl::StatusOr<bool> AdmitRequest(
    google::protobuf::io::ZeroCopyInputStream* request, size_t bytes);

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_REQUEST_SIZE_H_
