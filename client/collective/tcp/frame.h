#ifndef OPTSTATE_CLIENT_COLLECTIVE_TCP_FRAME_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TCP_FRAME_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/collective/element_type.h"

namespace optstate::client {

// The operation that a frame belongs to. The values are part of the frame.
enum class Operation : uint8_t {
  kAllReduce = 1,
  kReduceScatter = 2,
  kReduce = 3,
  kAllGather = 4,
  kBroadcast = 5,
  kBarrier = 6,
  // No operation: the sender has failed. `root` is the rank that failed first,
  // and the payload is its error, as text.
  kAbort = 255,
};

absl::string_view Name(Operation operation);

// The longest text of an abort, in bytes.
inline constexpr size_t kAbortTextBytesMax = 1024;

// The head of all that one rank sends to another, followed by payload_bytes of
// elements. All numbers are little endian:
//
//   offset  bytes
//        0      4  magic "OSC1"
//        4      1  operation
//        5      1  type
//        6      2  zero
//        8      4  from: the sender's rank
//       12      4  root
//       16      8  sequence: of the operation, from 1 on
//       24      8  exchange: within the operation, from 0 on
//       32      8  count: elements of the operation, of each rank's input
//       40      8  payload_bytes
struct Frame {
  static constexpr size_t kBytes = 48;
  using Bytes = std::array<std::byte, kBytes>;

  Operation operation = Operation::kBarrier;
  ElementType type = ElementType::kUint8;
  uint32_t from = 0;
  uint32_t root = 0;
  uint64_t sequence = 0;
  uint64_t exchange = 0;
  uint64_t count = 0;
  uint64_t payload_bytes = 0;
};

Frame::Bytes Encode(const Frame& frame);
// DATA_LOSS: these are not the bytes of a frame.
absl::StatusOr<Frame> Decode(absl::Span<const std::byte> bytes);

// Returns "all_reduce of 100 float32 (operation 7)".
std::string Describe(const Frame& frame);

// Checks that what a peer sends is what this rank expects from it in its own
// operation. FAILED_PRECONDITION: the ranks make different calls; names the
// first difference. DATA_LOSS: the frame names another sender.
absl::Status CheckExpected(const Frame& expected, const Frame& received);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TCP_FRAME_H_
