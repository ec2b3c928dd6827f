#ifndef OPTSTATE_PROTO_SHM_FRAME_H_
#define OPTSTATE_PROTO_SHM_FRAME_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/types/unique_fd.h"

namespace optstate::shm {

// Messages on a session socket: an 8-byte header, then one serialised protobuf
// message. fds travel with the header (SCM_RIGHTS).
//
//   offset 0  "OPST"          4 bytes, so that it is never HTTP/2's preface
//   offset 4  payload bytes   uint32, little endian, <= kFrameBytesMax
inline constexpr char kFrameMagic[4] = {'O', 'P', 'S', 'T'};
inline constexpr uint32_t kFrameBytesMax = 64u << 20;
inline constexpr int kFrameFdsMax = 4;
// The largest message of gRPC on a session stream: a layout, as in a frame.
inline constexpr uint32_t kMessageBytesMax = kFrameBytesMax;
// The largest data of one GradientChunk, LoadRequest, FetchReply or
// ParameterChunk.
inline constexpr uint32_t kChunkBytesMax = 1u << 20;
// The largest Hello, which untrusted peers send.
inline constexpr uint32_t kHelloBytesMax = 64u << 10;

inline constexpr uint32_t kProtocolVersion = 5;

struct Frame {
  std::string payload;
  std::vector<UniqueFd> fds;
};

// Sends one whole frame; blocks until `deadline`. UNAVAILABLE when the peer is
// gone, DEADLINE_EXCEEDED when it does not read.
absl::Status SendFrame(int socket, absl::string_view payload,
                       absl::Span<const int> fds, absl::Time deadline);

// Receives one whole frame. UNAVAILABLE: the peer closed (message "closed by
// peer" when nothing of a frame had arrived); INVALID_ARGUMENT: wrong magic, a
// payload over `payload_bytes_max`, or too many fds; DEADLINE_EXCEEDED.
// After an error other than a clean close the stream cannot be used further.
absl::StatusOr<Frame> ReceiveFrame(int socket, uint32_t payload_bytes_max,
                                   absl::Time deadline);

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_FRAME_H_
