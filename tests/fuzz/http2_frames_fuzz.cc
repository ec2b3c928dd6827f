// The frame headers of HTTP/2, which the daemon follows before gRPC sees a
// connection. Input: a byte of flags (1: the server's direction), a byte: how
// long the parts are in which the bytes come, the bytes.

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/admin/http2_frames.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

using admin::Http2Frames;

constexpr uint8_t kServer = 1;

std::string Frame(uint8_t type, uint8_t flags, uint8_t stream,
                  const std::string& payload) {
  std::string header(9, '\0');
  header[1] = static_cast<char>(payload.size() >> 8);
  header[2] = static_cast<char>(payload.size());
  header[3] = static_cast<char>(type);
  header[4] = static_cast<char>(flags);
  header[8] = static_cast<char>(stream);
  return header + payload;
}

void CheckAnswers(const Http2Frames& frames, absl::string_view text) {
  const absl::Status refusal = absl::ResourceExhaustedError(text);
  std::string answer =
      admin::SettingsFrame() + admin::SettingsAckFrame() +
      admin::TrailersOnlyFrame(frames.opened_stream(), refusal) +
      admin::GoAwayFrame(frames.opened_stream(), text);
  Http2Frames reader(Http2Frames::Sender::kServer);
  Require(reader.Take(answer).ok() && reader.at_boundary() &&
              reader.frame_count() == 4,
          "an answer is whole frames");
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  const std::string call = Frame(4, 0, 0, "") + Frame(1, 0, 1, "headers") +
                           Frame(9, 4, 1, "more") + Frame(0, 1, 1, "body");
  return {std::string("\0\xff", 2) + preface + call,
          std::string("\0\3", 2) + preface + call,
          std::string("\1\5", 2) + call,
          std::string("\0\xff", 2) + preface +
              Frame(1, 0, 3, std::string(16000, 'h')) +
              Frame(9, 0, 3, std::string(600, 'c'))};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate::fuzz;
  FuzzInput input(data, size);
  const auto sender = (input.Take<uint8_t>() & kServer) != 0
                          ? Http2Frames::Sender::kServer
                          : Http2Frames::Sender::kClient;
  const size_t part = std::max<size_t>(input.Take<uint8_t>(), 1);
  Http2Frames whole(sender);
  Http2Frames parts(sender);
  const absl::Status status = whole.Take(input.rest());
  absl::Status of_parts;
  const absl::string_view text = input.rest();
  while (!input.empty() && of_parts.ok()) {
    of_parts = parts.Take(input.TakeBytes(part));
  }
  Require(status.code() == of_parts.code(),
          "where the bytes are cut makes no difference");
  Require(!status.ok() || (whole.frame_count() == parts.frame_count() &&
                           whole.at_boundary() == parts.at_boundary() &&
                           whole.opened_stream() == parts.opened_stream()),
          "where the bytes are cut makes no difference to what is counted");
  CheckAnswers(whole, text);
  return 0;
}
