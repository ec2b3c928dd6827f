#include "server/admin/http2_frames.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::admin {
namespace {

constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kHeaderBytes = 9;
constexpr size_t kMessageBytesMax = 1024;

// RFC 9113, sections 6 and 7.
constexpr uint8_t kHeaders = 1;
constexpr uint8_t kSettings = 4;
constexpr uint8_t kGoAway = 7;
constexpr uint8_t kContinuation = 9;
constexpr uint8_t kAck = 1;
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;
constexpr uint32_t kEnhanceYourCalm = 11;

std::string BigEndian(uint32_t value, int bytes) {
  std::string text;
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
    text += static_cast<char>((value >> shift) & 0xff);
  }
  return text;
}

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream,
                  absl::string_view payload) {
  return absl::StrCat(BigEndian(static_cast<uint32_t>(payload.size()), 3),
                      BigEndian(type, 1), BigEndian(flags, 1),
                      BigEndian(stream, 4), payload);
}

// RFC 7541, 5.1, with a prefix of 7 bits and Huffman coding off.
std::string HpackString(absl::string_view text) {
  std::string out;
  size_t rest = text.size();
  if (rest < 127) {
    out += static_cast<char>(rest);
  } else {
    out += static_cast<char>(127);
    for (rest -= 127; rest >= 128; rest /= 128) {
      out += static_cast<char>(128 + rest % 128);
    }
    out += static_cast<char>(rest);
  }
  return absl::StrCat(out, text);
}

// A literal field without indexing, 6.2.2.
std::string Field(absl::string_view name, absl::string_view value) {
  return absl::StrCat(std::string(1, '\0'), HpackString(name),
                      HpackString(value));
}

// Encodes grpc-message as gRPC's specification of its protocol over HTTP/2
// requires.
std::string PercentEncoded(absl::string_view text) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text.substr(0, kMessageBytesMax)) {
    if (absl::ascii_isprint(c) && c != '%') {
      out += c;
    } else {
      const auto byte = static_cast<uint8_t>(c);
      absl::StrAppend(&out, "%", std::string(1, kDigits[byte >> 4]),
                      std::string(1, kDigits[byte & 15]));
    }
  }
  return out;
}

}  // namespace

Http2Frames::Http2Frames(Sender sender)
    : sender_(sender),
      preface_left_(sender == Sender::kClient ? kPreface.size() : 0) {}

absl::Status Http2Frames::Take(absl::string_view bytes) {
  const size_t preface = std::min(preface_left_, bytes.size());
  if (bytes.substr(0, preface) !=
      kPreface.substr(kPreface.size() - preface_left_, preface)) {
    return absl::InvalidArgumentError("not HTTP/2");
  }
  preface_left_ -= preface;
  bytes.remove_prefix(preface);
  while (!bytes.empty()) {
    if (payload_left_ != 0) {
      const size_t count = std::min<size_t>(payload_left_, bytes.size());
      payload_left_ -= static_cast<uint32_t>(count);
      bytes.remove_prefix(count);
      if (payload_left_ == 0) EndFrame();
      continue;
    }
    const size_t count = std::min(kHeaderBytes - header_.size(), bytes.size());
    header_.append(bytes.data(), count);
    bytes.remove_prefix(count);
    if (header_.size() == kHeaderBytes) OPTSTATE_RETURN_IF_ERROR(BeginFrame());
  }
  return absl::OkStatus();
}

absl::Status Http2Frames::BeginFrame() {
  const auto byte = [this](size_t i) {
    return static_cast<uint32_t>(static_cast<uint8_t>(header_[i]));
  };
  payload_left_ = byte(0) << 16 | byte(1) << 8 | byte(2);
  type_ = static_cast<uint8_t>(byte(3));
  flags_ = static_cast<uint8_t>(byte(4));
  stream_ = (byte(5) & 0x7f) << 24 | byte(6) << 16 | byte(7) << 8 | byte(8);
  header_.clear();
  ++frame_count_;
  if (type_ == kHeaders) block_bytes_ = 0;
  if (type_ == kHeaders || type_ == kContinuation) {
    block_bytes_ += std::min(payload_left_, kHeaderBlockBytesMax + 1);
    if (sender_ == Sender::kClient && block_bytes_ > kHeaderBlockBytesMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("a call's metadata may have ", kHeaderBlockBytesMax,
                       " bytes, compressed"));
    }
  }
  if (payload_left_ == 0) EndFrame();
  return absl::OkStatus();
}

void Http2Frames::EndFrame() {
  if ((type_ == kHeaders || type_ == kContinuation) &&
      (flags_ & kEndHeaders) != 0) {
    opened_stream_ = stream_;
  }
}

std::string SettingsFrame() { return Frame(kSettings, 0, 0, ""); }

std::string SettingsAckFrame() { return Frame(kSettings, kAck, 0, ""); }

std::string GoAwayFrame(uint32_t last_stream, absl::string_view why) {
  return Frame(
      kGoAway, 0, 0,
      absl::StrCat(BigEndian(last_stream, 4), BigEndian(kEnhanceYourCalm, 4),
                   why.substr(0, kMessageBytesMax)));
}

std::string TrailersOnlyFrame(uint32_t stream, const absl::Status& status) {
  // :status 200 is entry 8 of the static table.
  const std::string block = absl::StrCat(
      "\x88", Field("content-type", "application/grpc"),
      Field("grpc-status", absl::StrCat(static_cast<int>(status.code()))),
      Field("grpc-message", PercentEncoded(status.message())));
  return Frame(kHeaders, kEndStream | kEndHeaders, stream, block);
}

}  // namespace optstate::admin
