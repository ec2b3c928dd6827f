#include "client/collective/tcp/frame.h"

#include "absl/strings/str_cat.h"

namespace optstate::client {
namespace {

constexpr uint32_t kMagic = 0x3143534F;  // "OSC1"

constexpr bool IsValidOperation(uint32_t value) {
  return (value >= 1 && value <= 6) || value == 255;
}

template <typename Number>
void Put(Number value, size_t offset, Frame::Bytes* bytes) {
  for (size_t i = 0; i < sizeof(Number); ++i) {
    (*bytes)[offset + i] =
        static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i) & 0xFF);
  }
}

template <typename Number>
Number Take(absl::Span<const std::byte> bytes, size_t offset) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(Number); ++i) {
    value |= static_cast<uint64_t>(bytes[offset + i]) << (8 * i);
  }
  return static_cast<Number>(value);
}

absl::Status Differ(const Frame& expected, const Frame& received,
                    absl::string_view what) {
  return absl::FailedPreconditionError(
      absl::StrCat("ranks make different calls, the first difference is the ",
                   what, ": rank ", received.from, " is in ",
                   Describe(received), ", this rank in ", Describe(expected),
                   ". All ranks make the same calls in the same order"));
}

bool HasRoot(Operation operation) {
  return operation == Operation::kReduce || operation == Operation::kBroadcast;
}

bool HasType(Operation operation) {
  return operation != Operation::kBarrier && operation != Operation::kAbort;
}

}  // namespace

absl::string_view Name(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kReduce:
      return "reduce";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kBarrier:
      return "barrier";
    case Operation::kAbort:
      return "abort";
  }
  return "invalid";
}

Frame::Bytes Encode(const Frame& frame) {
  Frame::Bytes bytes = {};
  Put(kMagic, 0, &bytes);
  Put(static_cast<uint8_t>(frame.operation), 4, &bytes);
  Put(static_cast<uint8_t>(frame.type), 5, &bytes);
  Put(frame.from, 8, &bytes);
  Put(frame.root, 12, &bytes);
  Put(frame.sequence, 16, &bytes);
  Put(frame.exchange, 24, &bytes);
  Put(frame.count, 32, &bytes);
  Put(frame.payload_bytes, 40, &bytes);
  return bytes;
}

absl::StatusOr<Frame> Decode(absl::Span<const std::byte> bytes) {
  if (bytes.size() != Frame::kBytes || Take<uint32_t>(bytes, 0) != kMagic ||
      Take<uint16_t>(bytes, 6) != 0) {
    return absl::DataLossError("bytes that are no frame");
  }
  const auto operation = Take<uint8_t>(bytes, 4);
  const auto type = Take<uint8_t>(bytes, 5);
  if (!IsValidOperation(operation) || !IsValidElementType(type)) {
    return absl::DataLossError(
        absl::StrCat("a frame of operation ", operation, " and element type ",
                     type, ", which this build does not know"));
  }
  return Frame{.operation = static_cast<Operation>(operation),
               .type = static_cast<ElementType>(type),
               .from = Take<uint32_t>(bytes, 8),
               .root = Take<uint32_t>(bytes, 12),
               .sequence = Take<uint64_t>(bytes, 16),
               .exchange = Take<uint64_t>(bytes, 24),
               .count = Take<uint64_t>(bytes, 32),
               .payload_bytes = Take<uint64_t>(bytes, 40)};
}

std::string Describe(const Frame& frame) {
  std::string text(Name(frame.operation));
  if (HasType(frame.operation)) {
    absl::StrAppend(&text, " of ", frame.count, " ", Name(frame.type));
  }
  if (HasRoot(frame.operation)) absl::StrAppend(&text, " at ", frame.root);
  absl::StrAppend(&text, " (operation ", frame.sequence, ")");
  return text;
}

absl::Status CheckExpected(const Frame& expected, const Frame& received) {
  if (received.from != expected.from) {
    return absl::DataLossError(
        absl::StrCat("rank ", expected.from,
                     " has sent a frame in the name of rank ", received.from));
  }
  if (received.sequence != expected.sequence) {
    return Differ(expected, received, "number of the operation");
  }
  if (received.operation != expected.operation) {
    return Differ(expected, received, "operation");
  }
  if (received.type != expected.type) {
    return Differ(expected, received, "element type");
  }
  if (received.root != expected.root) {
    return Differ(expected, received, "root");
  }
  if (received.count != expected.count) {
    return Differ(expected, received, "number of elements");
  }
  // These follow from the count and from settings of the collective.
  if (received.exchange != expected.exchange ||
      received.payload_bytes != expected.payload_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", received.from, " cuts ", Describe(received),
        " into other parts than this rank (part ", received.exchange, " of ",
        received.payload_bytes, " bytes, expected part ", expected.exchange,
        " of ", expected.payload_bytes,
        "): give all ranks the same slice_bytes"));
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
