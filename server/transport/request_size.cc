#include "server/transport/request_size.h"

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/message.h"
#include "google/protobuf/wire_format_lite.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/memory_available.h"
#include "proto/types/status_macros.h"

namespace optstate::transport {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::MessageFactory;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Memory of a message besides itself: its pointer, twice while their array
// grows, and the allocator's overhead.
constexpr uint64_t kMessageOverhead = 32;
// Memory of a string besides its characters, likewise.
constexpr uint64_t kStringOverhead = 64;
// Memory of a number in a repeated field, or in an unknown field.
constexpr uint64_t kNumberBytes = 16;
constexpr uint64_t kUnknownBytes = 48;
// Copies of a request: it is parsed, then converted to the Job's types.
constexpr uint64_t kCopies = 2;

class Counter {
 public:
  explicit Counter(CodedInputStream* input) : input_(input) {}

  // Counts a message of type `type`; false: it is malformed.
  bool Count(const Descriptor* type) {
    while (const uint32_t tag = input_->ReadTag()) {
      const FieldDescriptor* const field =
          type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      if (!CountField(field, WireFormatLite::GetTagWireType(tag))) return false;
      if (bytes_ > kParsedBytesMax) return true;
    }
    return input_->ConsumedEntireMessage();
  }

  uint64_t bytes() const { return bytes_; }

 private:
  bool CountField(const FieldDescriptor* field, WireFormatLite::WireType wire) {
    uint64_t varint = 0;
    uint32_t fixed = 0;
    switch (wire) {
      case WireFormatLite::WIRETYPE_VARINT:
        CountNumber(field);
        return input_->ReadVarint64(&varint);
      case WireFormatLite::WIRETYPE_FIXED64:
        CountNumber(field);
        return input_->ReadLittleEndian64(&varint);
      case WireFormatLite::WIRETYPE_FIXED32:
        CountNumber(field);
        return input_->ReadLittleEndian32(&fixed);
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        return CountBytes(field);
      default:  // a group, which the protocol does not use
        return false;
    }
  }

  void CountNumber(const FieldDescriptor* field) {
    if (field == nullptr) {
      bytes_ += kUnknownBytes;
    } else if (field->is_repeated()) {
      bytes_ += kNumberBytes;
    }
  }

  bool CountBytes(const FieldDescriptor* field) {
    int length = 0;
    if (!input_->ReadVarintSizeAsInt(&length)) return false;
    const auto size = static_cast<uint64_t>(length);
    if (field == nullptr) {
      bytes_ += kUnknownBytes + kStringOverhead + size;
      return input_->Skip(length);
    }
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return CountMessage(field->message_type(), length);
      case FieldDescriptor::CPPTYPE_STRING:
        bytes_ += kStringOverhead + size;
        return input_->Skip(length);
      default:  // packed: a number may be one byte
        bytes_ += size * kNumberBytes;
        return input_->Skip(length);
    }
  }

  bool CountMessage(const Descriptor* type, int length) {
    bytes_ += kMessageOverhead + EmptyBytes(type);
    if (depth_ == kDepthMax) return false;
    ++depth_;
    const auto limit = input_->PushLimit(length);
    const bool counted = Count(type);
    input_->PopLimit(limit);
    --depth_;
    return counted;
  }

  // Memory of an empty message.
  uint64_t EmptyBytes(const Descriptor* type) {
    uint64_t& bytes = empty_bytes_[type];
    if (bytes == 0) {
      bytes = MessageFactory::generated_factory()
                  ->GetPrototype(type)
                  ->SpaceUsedLong();
    }
    return bytes;
  }

  static constexpr int kDepthMax = 16;

  CodedInputStream* const input_;
  absl::flat_hash_map<const Descriptor*, uint64_t> empty_bytes_;
  uint64_t bytes_ = 0;
  int depth_ = 0;
};

}  // namespace

absl::StatusOr<uint64_t> ParsedBytes(
    google::protobuf::io::ZeroCopyInputStream* request) {
  CodedInputStream input(request);
  Counter counter(&input);
  if (!counter.Count(v1::SessionRequest::descriptor())) {
    return absl::InvalidArgumentError("no SessionRequest");
  }
  return counter.bytes();
}

absl::StatusOr<bool> AdmitRequest(
    google::protobuf::io::ZeroCopyInputStream* request, size_t bytes) {
  if (bytes <= kSmallRequestBytes) return false;
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t parsed, ParsedBytes(request));
  if (parsed > kParsedBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a request of ", bytes, " bytes would take more than ",
        kParsedBytesMax >> 20,
        " MiB in memory: its layout has too many parameters or groups"));
  }
  if (parsed <= kLargeParsedBytes) return false;
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t available, AvailableMemoryBytes());
  if (kCopies * parsed <= available) return true;
  return absl::ResourceExhaustedError(absl::StrCat(
      "a request of ", bytes, " bytes takes ", kCopies * parsed,
      " bytes of memory, and the daemon's machine has ", available, " left"));
}

}  // namespace optstate::transport
